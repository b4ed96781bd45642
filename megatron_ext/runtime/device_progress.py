"""Progress of a GPU through the work that its host has launched.

A host runs ahead of its device: on NCCL, a wait for a message only makes the stream wait and
returns to the host at once. The host's position therefore does not show where the device is stuck.
Messages' memory is also freed only when the device has passed them, so a host far ahead takes more
memory than the schedule says. An event is therefore recorded after each pass and each wait. Before
a pass the host waits for the event of the pass `PASSES_AHEAD` earlier, which is its only wait for
the device within a step. The watchdog queries the events and never waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_ext.runtime.position import Position
from megatron_ext.schedule.action import Action, OverlappedPasses

# Number of passes that the host may be ahead of its device. Two aims conflict: the device must stay
# busy while the host is briefly delayed, and the messages of each pass ahead take memory.
PASSES_AHEAD = 4


class DeviceEvent(Protocol):
    """Marker behind the work launched on the device so far (`torch.cuda.Event`)."""

    def query(self) -> bool:
        """Return whether the device has finished the work before this marker."""

    def synchronize(self) -> None:
        """Wait until the device has finished the work before this marker."""


def record_event() -> DeviceEvent | None:
    """Return an event on the current stream; None in a process without a GPU.

    Without a GPU a call's work has finished when the call returns.
    """
    if not torch.cuda.is_initialized():
        return None
    # With a blocking event the waiting host sleeps. The wait lasts as long as passes, and data
    # loaders need the CPU core.
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event


@dataclass(frozen=True)
class DevicePosition:
    """Position of a rank's device (GPU) in the program that the rank runs.

    Attributes:
        ended: the last pass that the device has finished, if any.
        pending: the first launched work that the device has not finished.
        since: `time.monotonic` seconds at which ``pending`` was first seen to be the next.
    """

    ended: Action | OverlappedPasses | str | None
    pending: Position
    since: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def __str__(self) -> str:
        ended = "" if self.ended is None else f"has ended {self.ended} and "
        return f"{ended}is {self.pending.doing} for {self.seconds:.1f} s"


class DeviceProgress:
    """Tracker of the passes that a rank's device has finished.

    ``record`` makes an event, or returns None (`record_event`).

    Attributes:
        position: position of the device at the latest `look`; None if all launched work had
            finished.
    """

    def __init__(self, record: Callable[[], DeviceEvent | None] = record_event) -> None:
        self.position: DevicePosition | None = None
        self._record = record
        # Events after passes for which the host has not waited yet.
        self._passes: deque[DeviceEvent] = deque()
        # Positions in the row whose event had not finished when it was last queried.
        self._given: deque[tuple[Position, DeviceEvent]] = deque()
        # Newest position in `_given` at the latest call of `look`.
        self._newest: tuple[Position, DeviceEvent] | None = None
        self._ended: Action | OverlappedPasses | str | None = None
        self._lock = threading.Lock()

    def hold_back(self) -> None:
        """Wait before a pass until at most `PASSES_AHEAD` passes, with this one, are unfinished."""
        if len(self._passes) == PASSES_AHEAD:
            self._passes.popleft().synchronize()

    def add(self, position: Position) -> None:
        """Note that the host has launched the work of ``position`` on the device."""
        event = self._record()
        if event is None:
            return
        if position.peer is None:
            self._passes.append(event)
        with self._lock:
            self._drop_ended()
            self._given.append((position, event))

    def look(self) -> None:
        """Update `position`, the device's. Called from any thread, about once a second.

        The device is queried only if the host has launched nothing since the last look. A host that
        goes on shows that the device does too (`hold_back`), and a query may wait for the driver.
        """
        with self._lock:
            newest = self._given[-1] if self._given else None
            has_stopped, self._newest = newest is self._newest, newest
            if has_stopped:
                self._drop_ended()
            pending = self._given[0][0] if self._given and has_stopped else None
            ended = self._ended
        if pending is None:
            self.position = None
        elif self.position is None or self.position.pending is not pending:
            self.position = DevicePosition(ended, pending, time.monotonic())

    def stop_asking(self) -> None:
        """Query no event until more work is launched, because a CUDA graph is about to be captured.

        No thread may query an event during a capture.
        """
        with self._lock:
            self._drop_ended()
            self._given.clear()

    def _drop_ended(self) -> None:
        while self._given and self._given[0][1].query():
            position, _ = self._given.popleft()
            if position.peer is None:
                self._ended = position.action


def unhindered() -> DeviceProgress:
    """Return the progress of a device that is never queried and never holds its host back."""
    return DeviceProgress(lambda: None)
