"""Where a rank is in its program: for its watchdog, its error messages, profilers and traces.

Every pass and every wait, on the host and on the device, is noted in this one place.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from megatron_ext.runtime.device_progress import DeviceProgress
from megatron_ext.runtime.held_bytes import HeldBytes
from megatron_ext.runtime.position import Position
from megatron_ext.runtime.rank_identity import RankIdentity
from megatron_ext.runtime.recording import Clock, RecordedReduction, Recording, passes_of
from megatron_ext.runtime.store.failure_report import FailureReport
from megatron_ext.schedule.action import Action, Pair


class Recorder:
    """Keeps the current `Position`; marks compute for Nsight with ranges named by the actions.

    Of a step that somebody has it `record` it notes when passes and reductions begin and end; while
    there is a ``counting``, that counts what passes hold.

    Attributes:
        position: the host's; None between passes and waits.
        device: how far the device has come; holds the host back that runs ahead of it.
        rank_identity: which process this rank is.
        failure_report: tells the other ranks that this one has failed; None until connected.
        in_step: a step is under way.
        has_failed: a step has ended by an error on this rank.
        interruption: what another rank has said that failed; this rank's step ends by it.
    """

    def __init__(
        self,
        rank: int,
        rank_identity: RankIdentity | None = None,
        device: DeviceProgress | None = None,
    ) -> None:
        self.rank = rank
        self.rank_identity = rank_identity or RankIdentity(rank)
        self.device = device or DeviceProgress()
        self.position: Position | None = None
        self.failure_report: FailureReport | None = None
        self.in_step = False
        self.has_failed = False
        self.interruption: str | None = None
        self.ranges = torch.cuda.is_available()
        self.counting: HeldBytes | None = None
        self._recording: Recording | None = None  # of the step that runs
        self._records_reductions = False

    def begin(self, iteration: int) -> None:
        """What follows belongs to ``iteration``."""
        self.rank_identity = replace(self.rank_identity, iteration=iteration)

    def record(self, clock: Clock, *, with_reductions: bool = False) -> Recording:
        """Record the passes until `end`, once for all who ask: they get the same recording."""
        if self._recording is None:
            self._recording = Recording(self.rank, clock)
        self._records_reductions |= with_reductions
        return self._recording

    def reducing(self, stage: int) -> RecordedReduction | None:
        """A reduction of the gradients of ``stage``, which begins now, if they are recorded."""
        if self._recording is None or not self._records_reductions:
            return None
        return self._recording.begin_reduction(stage)

    def end(self) -> None:
        """What follows is not recorded, unless somebody asks for it again."""
        self._recording, self._records_reductions = None, False

    def computing(self, action: Action | Pair) -> AbstractContextManager[None]:
        """Within, the rank is in the pass ``action``, or in two that run as one."""
        position = Position(self.rank, action, None, "", time.monotonic())
        stay = _Stay(self, position)
        if self._recording is not None:
            stay = _RecordedStay(self, position, self._recording)
        if self.counting is not None:
            return _counted(stay, self.counting, passes_of(action))
        return stay

    def forget(self) -> None:
        """The step begins again: what was recorded of it is dropped."""
        if self._recording is not None:
            self._recording.forget()

    def waiting(self, action: Action, peer: int, direction: str) -> AbstractContextManager[None]:
        """Within, the rank is blocked in a wait for the message ``action``; see `Position`."""
        return _Stay(self, Position(self.rank, action, peer, direction, time.monotonic()))

    def failed(self, error: BaseException, action: Action | Pair | str) -> None:
        """The step ends by ``error``, in ``action`` (or where it says): note it, and tell the
        others."""
        self.has_failed = True
        where = f"pipeline rank {self.rank}, in {action} {self.rank_identity.note()}"
        error.add_note(f"megatron_ext: {where}")
        if self.failure_report is not None:
            self.failure_report.leave(f"{where}: {type(error).__name__}: {error}")

    def report(self) -> str:
        """Where host and device are, in words."""
        position, device = self.position, self.device.position
        host = f"pipeline rank {self.rank} between passes" if position is None else str(position)
        its_device = "" if device is None else f"; its device {device}"
        peers = [*(position.peers if position else ()), *(device.pending.peers if device else ())]
        return f"{host}{its_device} {self.rank_identity.note(*peers)}"


class _Stay:
    """Within, a rank is at a position. (One for each action: a generator would cost more.)"""

    __slots__ = ("_position", "_recorder")

    def __init__(self, recorder: Recorder, position: Position) -> None:
        self._recorder = recorder
        self._position = position

    def __enter__(self) -> None:
        if self._position.peer is None:
            self._recorder.device.hold_back()
            if self._recorder.ranges:
                torch.cuda.nvtx.range_push(str(self._position.action))
        self._recorder.position = self._position

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._recorder.position = None
        if self._recorder.ranges and self._position.peer is None:
            torch.cuda.nvtx.range_pop()
        if error is None:
            self._recorder.device.add(self._position)


@contextlib.contextmanager
def _counted(stay: _Stay, counting: HeldBytes, actions: tuple[Action, ...]) -> Iterator[None]:
    with stay, contextlib.ExitStack() as counts:
        for action in actions:
            counts.enter_context(counting.around(action))
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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._recording.add_pass(self._position.action, self._began)
        super().__exit__(kind, error, trace)
