"""Where a rank is in its program: for its watchdog, its error messages, profilers and traces."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from megatron_ext.runtime.held_bytes import HeldBytes
from megatron_ext.runtime.recording import Recording
from megatron_ext.schedule.action import Action


class Position(NamedTuple):
    """What a rank does since ``since`` (`time.monotonic` seconds).

    ``peer`` is the pipeline rank it waits for; None while it computes.
    """

    rank: int
    action: Action
    peer: int | None
    since: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def __str__(self) -> str:
        doing = "in" if self.peer is None else "waiting for"
        peer = "" if self.peer is None else f" with pipeline rank {self.peer}"
        return f"pipeline rank {self.rank} {doing} {self.action}{peer} for {self.seconds:.1f} s"


class Recorder:
    """Keeps the current `Position`; marks compute for Nsight with ranges named by the actions.

    While there is a ``recording``, it is told when passes begin and end; while there is a
    ``counting``, it counts what they hold.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position: Position | None = None  # None between steps
        self.ranges = torch.cuda.is_available()
        self.recording: Recording | None = None
        self.counting: HeldBytes | None = None

    def computing(self, action: Action) -> AbstractContextManager[None]:
        """Around a pass."""
        position = Position(self.rank, action, None, time.monotonic())
        stay = _Stay(self, position)
        if self.recording is not None:
            stay = _RecordedStay(self, position, self.recording)
        if self.counting is not None:
            return _counted(stay, self.counting, action)
        return stay

    def forget(self) -> None:
        """The step begins again: what was recorded of it did not count."""
        if self.recording is not None:
            self.recording.forget()

    def waiting(self, action: Action, peer: int) -> AbstractContextManager[None]:
        """Around a blocking wait for the message ``action``."""
        return _Stay(self, Position(self.rank, action, peer, time.monotonic()))


class _Stay:
    """A rank stays at a position. (Once an action: a class costs less than a generator.)"""

    __slots__ = ("_position", "_recorder")

    def __init__(self, recorder: Recorder, position: Position) -> None:
        self._recorder = recorder
        self._position = position

    def __enter__(self) -> None:
        if self._recorder.ranges and self._position.peer is None:
            torch.cuda.nvtx.range_push(str(self._position.action))
        self._recorder.position = self._position

    def __exit__(self, *error: object) -> None:
        self._recorder.position = None
        if self._recorder.ranges and self._position.peer is None:
            torch.cuda.nvtx.range_pop()


@contextlib.contextmanager
def _counted(stay: _Stay, counting: HeldBytes, action: Action) -> Iterator[None]:
    with stay, counting.around(action):
        yield


class _RecordedStay(_Stay):
    """A pass, of which nothing is recorded but itself."""

    __slots__ = ("_began", "_recording")

    def __init__(self, recorder: Recorder, position: Position, recording: Recording) -> None:
        super().__init__(recorder, position)
        self._recording = recording

    def __enter__(self) -> None:
        super().__enter__()
        self._began = self._recording.clock.mark()

    def __exit__(self, *error: object) -> None:
        self._recording.add_pass(self._position.action, self._began)
        super().__exit__(*error)
