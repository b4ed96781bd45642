"""Copies between a rank's memory and the host's, on a GPU and on a CPU (where both are one).

Copies must run parallel to the passes, in both directions at once, and never read memory that a
pass still writes. On a GPU two streams and their events do this; on a CPU a copy is done at once,
so that offload can be tested there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_ext.base.words import bytes_text
from megatron_ext.runtime.host.pages import whole_pages
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.kinds import RULES, Lane

# Destination and source of a copy: byte tensors of equal length.
CopiedBytes = tuple[Tensor, Tensor]


class Transfer(Protocol):
    """Started copy between a device and the host."""

    def wait(self) -> None:
        """Make later work of this rank wait for the copy; raise the copy's error if it failed."""

    def finish(self) -> None:
        """Block the host until the copy is done."""


class Done:
    """`Transfer` (copy between device and host) that has ended already."""

    def wait(self) -> None:
        pass

    def finish(self) -> None:
        pass


class DirectCopies:
    """Synchronous copies, for a rank whose memory is the host's."""

    def current_stream(self) -> torch.cuda.Stream | None:
        """Return the stream on which the caller launches its work.

        Return None for a device without streams.
        """
        return None

    def host_buffer(self, size: int) -> Tensor:
        """Return ``size`` bytes of host memory with fast copies to and from the device.

        May wait for the device. Raises ValueError if the driver refuses to pin the memory.
        """
        return whole_pages(size)

    def release(self, buffer: Tensor) -> None:
        """Free a host buffer that no copy uses any more. May wait for the device."""

    def start(
        self, action: Action, pieces: Sequence[CopiedBytes], after: Transfer | None
    ) -> Transfer:
        """Start the copy ``action`` after the work launched so far, and after ``after``.

        Copies of one direction run in order. ``pieces`` may be empty: nothing is copied.
        """
        for to, source in pieces:
            to.copy_(source)
        return Done()


@dataclass(frozen=True)
class _Event:
    """`Transfer` (copy between device and host) that was started on a stream."""

    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def finish(self) -> None:
        self.event.synchronize()


class CudaCopies:
    """Copies between a GPU and its host on two streams of their own, one for each direction.

    The host waits for no copy, except to or from pageable memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = {lane: torch.cuda.Stream(device) for lane in (Lane.TO_HOST, Lane.FROM_HOST)}

    def current_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream()

    def host_buffer(self, size: int) -> Tensor:
        return pinned(size)

    def release(self, buffer: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    def start(
        self, action: Action, pieces: Sequence[CopiedBytes], after: Transfer | None
    ) -> Transfer:
        stream = self._streams[RULES[action.kind].lane]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if after is not None:
                after.wait()
            for to, source in pieces:
                to.copy_(source, non_blocking=True)
            return _Event(stream.record_event())


def pinned(size: int) -> Tensor:
    """Return exactly ``size`` bytes of pinned host memory, where torch would round up to 2^n.

    Raises:
        ValueError: the driver refuses to pin the memory.
    """
    buffer = whole_pages(size)
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(buffer.data_ptr(), size, 0)
    if int(code) != 0:
        raise ValueError(
            f"{bytes_text(size)} of host memory cannot be pinned for offloaded activations "
            f"(cudaHostRegister: {runtime.cudaGetErrorString(code)}): raise the limit of locked "
            f"memory ('ulimit -l unlimited', a container's memlock)"
        )
    return buffer


HostCopies = DirectCopies | CudaCopies


def copies_on(device: torch.device) -> HostCopies:
    """Return the copier between host and device for a rank on ``device``."""
    return CudaCopies(device) if device.type == "cuda" else DirectCopies()
