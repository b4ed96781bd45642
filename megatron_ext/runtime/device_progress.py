"""What a GPU has ended of what its host has given it.

A host runs ahead of its device. Nobody who looks at the host alone sees where the device is stuck:
there, to wait for a message is to have the stream wait, which takes no time. And what messages
leave behind is free only when the device has passed it: a host far ahead keeps more memory than any
schedule says. So an event stands behind each pass and each wait. The host waits for that of a pass
some passes ago before it begins another, and for nothing else of the device within a step; the
watchdog asks which have ended, and waits for none.
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
from megatron_ext.schedule.action import Action, Pair

# Enough that the device has work while the host is held up for a moment, and no more: each is a
# pass whose messages' memory is not free yet.
PASSES_AHEAD = 4


class DeviceEvent(Protocol):
    """Stands behind what the host has given the device so far (`torch.cuda.Event`)."""

    def query(self) -> bool:
        """Whether all of that has ended."""
        ...

    def synchronize(self) -> None:
        """Return when all of that has ended."""
        ...


def record_event() -> DeviceEvent | None:
    """An event on the current stream; None in a process without a GPU, where what a call has been
    given has ended when it returns."""
    if not torch.cuda.is_initialized():
        return None
    # Whoever waits for it sleeps: it is passes away, and the data loader can use the core.
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event


@dataclass(frozen=True)
class DevicePosition:
    """Where a device is: it has not ended ``pending`` yet, which was the next of all to end when it
    was first looked at, at ``since`` (`time.monotonic` seconds). ``ended`` is its last pass."""

    ended: Action | Pair | None
    pending: Position
    since: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def __str__(self) -> str:
        ended = "" if self.ended is None else f"has ended {self.ended} and "
        return f"{ended}is {self.pending.doing} for {self.seconds:.1f} s"


class DeviceProgress:
    """``record`` makes an event, or None (`record_event`).

    Attributes:
        position: as of the latest `look`; None if all that was given had ended.
    """

    def __init__(self, record: Callable[[], DeviceEvent | None] = record_event) -> None:
        self.position: DevicePosition | None = None
        self._record = record
        self._passes: deque[DeviceEvent] = deque()  # those that no pass has waited for
        self._given: deque[tuple[Position, DeviceEvent]] = deque()  # not seen to have ended
        self._newest: tuple[Position, DeviceEvent] | None = None  # of those, at the latest look
        self._ended: Action | Pair | None = None
        self._lock = threading.Lock()

    def hold_back(self) -> None:
        """Before a pass: return when no more than `PASSES_AHEAD` will be under way with it."""
        if len(self._passes) == PASSES_AHEAD:
            self._passes.popleft().synchronize()

    def add(self, position: Position) -> None:
        """The device has been given what the host did at ``position``."""
        event = self._record()
        if event is None:
            return
        if position.peer is None:
            self._passes.append(event)
        with self._lock:
            self._drop_ended()
            self._given.append((position, event))

    def look(self) -> None:
        """Learn where the device is, from any thread, once a second or so.

        It is asked only when the host has given it nothing since the last look. As long as the host
        goes on the device does too, by `hold_back`, and a query may wait for the driver.
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
        """Ask the device nothing until it is given more: a CUDA graph is about to be captured, and
        meanwhile no thread may query an event."""
        with self._lock:
            self._drop_ended()
            self._given.clear()

    def _drop_ended(self) -> None:
        while self._given and self._given[0][1].query():
            position, _ = self._given.popleft()
            if position.peer is None:
                self._ended = position.action
