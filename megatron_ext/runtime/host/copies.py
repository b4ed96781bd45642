"""Copies between a rank's memory and the host's: on a GPU, and on a CPU, where both are one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_ext.runtime.host.pages import whole_pages
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.words import bytes_text

Piece = tuple[Tensor, Tensor]  # where to and where from: bytes, of one length


class Transfer(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Let what this rank starts from now on come after it. Raises what the copy has raised."""
        ...

    def finish(self) -> None:
        """Return when it is done."""
        ...


class HostCopies(Protocol):
    """Starts copies. Those of one direction run one after the other."""

    def current_stream(self) -> torch.cuda.Stream | None:
        """The stream that the caller gives its work to; None for a device without streams."""
        ...

    def host_buffer(self, size: int) -> Tensor:
        """``size`` bytes of the host's memory, to and from which copies are quick.

        May wait for the device. Raises ValueError where they are refused.
        """
        ...

    def release(self, buffer: Tensor) -> None:
        """Give a buffer back that no copy uses any more. May wait for the device."""
        ...

    def start(self, action: Action, pieces: Sequence[Piece], after: Transfer | None) -> Transfer:
        """Start the copy ``action``, when what the rank has started so far is done, and ``after``.

        ``pieces`` may be none: a copy of nothing.
        """
        ...


class Done:
    """A `Transfer` that has ended."""

    def wait(self) -> None:
        pass

    def finish(self) -> None:
        pass


class DirectCopies:
    """Copies made at once, for a rank whose memory is the host's."""

    def current_stream(self) -> torch.cuda.Stream | None:
        return None

    def host_buffer(self, size: int) -> Tensor:
        return whole_pages(size)

    def release(self, buffer: Tensor) -> None:
        pass

    def start(self, action: Action, pieces: Sequence[Piece], after: Transfer | None) -> Transfer:
        for to, source in pieces:
            to.copy_(source)
        return Done()


@dataclass(frozen=True)
class _Event:
    """A `Transfer` on a stream."""

    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def finish(self) -> None:
        self.event.synchronize()


class CudaCopies:
    """On two streams, one a direction, beside the stream of the passes. The host waits for none,
    but for copies to or from memory that is not pinned."""

    def __init__(self, device: torch.device) -> None:
        self._streams = {lane: torch.cuda.Stream(device) for lane in (Lane.TO_HOST, Lane.FROM_HOST)}

    def current_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream()

    def host_buffer(self, size: int) -> Tensor:
        return pinned(size)

    def release(self, buffer: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

    def start(self, action: Action, pieces: Sequence[Piece], after: Transfer | None) -> Transfer:
        stream = self._streams[RULES[action.kind].lane]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if after is not None:
                after.wait()
            for to, source in pieces:
                to.copy_(source, non_blocking=True)
            return _Event(stream.record_event())


def pinned(size: int) -> Tensor:
    """``size`` bytes of pinned memory; exactly, where torch's own allocator takes a power of two.

    Raises:
        ValueError: the driver refuses.
    """
    buffer = whole_pages(size)
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(buffer.data_ptr(), size, 0)
    if int(code) != 0:
        raise ValueError(
            f"{bytes_text(size)} of host memory cannot be pinned for offloaded activations "
            f"(cudaHostRegister: {runtime.cudaGetErrorString(code)}): raise the limit of locked "
            f"memory ('ulimit -l unlimited', a container's memlock), offload less "
            f"(--pipeline-activation-offload half), or none"
        )
    return buffer


def copies_on(device: torch.device) -> HostCopies:
    """The `HostCopies` for a rank on ``device``."""
    return CudaCopies(device) if device.type == "cuda" else DirectCopies()
