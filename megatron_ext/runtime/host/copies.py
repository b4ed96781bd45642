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
        """Make later work of this rank wait for the copy. Raises the copy's error, if it has
        one."""

    def finish(self) -> None:
        """Block the host until the copy is done."""


class Done:
    """A `Transfer` that has ended."""

    def wait(self) -> None:
        pass

    def finish(self) -> None:
        pass


class DirectCopies:
    """Synchronous copies, for a rank whose memory is the host's."""

    def current_stream(self) -> torch.cuda.Stream | None:
        """Return the stream on which the caller launches its work; None for a device without
        streams."""
        return None

    def host_buffer(self, size: int) -> Tensor:
        """Return ``size`` bytes of host memory with fast copies to and from the device.

        May wait for the device. Raises ValueError if the driver refuses to pin the memory.
        """
        return whole_pages(size)

    def release(self, buffer: Tensor) -> None:
        """Free a host buffer that no copy uses any more. The call may wait for the device."""

    def start(
        self, action: Action, pieces: Sequence[CopiedBytes], after: Transfer | None
    ) -> Transfer:
        """Start the copy ``action`` once the work launched so far on this rank, and ``after``, are
        done. Copies of one direction run in order.

        ``pieces`` may be empty: nothing is copied.
        """
        for to, source in pieces:
            to.copy_(source)
        return Done()


@dataclass(frozen=True)
class _Event:
    """Started copy on a stream, a `Transfer`."""

    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def finish(self) -> None:
        self.event.synchronize()


class CudaCopies:
    """Copies on two streams of their own, one for each direction. The host waits for no copy,
    except to or from pageable memory."""

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
    """Return exactly ``size`` bytes of pinned memory. (torch's own allocator rounds up to a power
    of two.)

    Raises:
        ValueError: the driver refuses to pin it.
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
