"""Position of a rank in its program, for its watchdog, error messages, profilers and traces.

Every pass and every wait, on the host and on the device, is noted in this one place.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_ext.runtime.device_progress import DeviceProgress, unhindered
from megatron_ext.runtime.held_bytes import HeldBytes
from megatron_ext.runtime.position import Position
from megatron_ext.runtime.rank_identity import RankIdentity, first_identity
from megatron_ext.runtime.recording import Clock, RecordedReduction, Recording, passes_of
from megatron_ext.runtime.store.failure_report import FailureReport
from megatron_ext.schedule.action import Action, OverlappedPasses


class Closable(Protocol):
    """Connections that any thread can close."""

    def close(self) -> None: ...


class Recorder:
    """Record of a rank's current `Position`, and on request of the times and memory of passes.

    Compute is marked for Nsight with ranges named by the actions. The begin and end of passes and
    reductions are recorded if `record` was called for the step, and the memory of passes is
    measured while ``counting`` is set.

    Attributes:
        position: position of the host; None between passes and waits.
        device: progress of the device; holds back a host that runs too far ahead.
        rank_identity: process of this rank.
        failure_report: tells the other ranks that this one has failed; None until connected.
        in_step: whether passes run, or a connection is being made: an error of another rank can be
            raised then.
        has_failed: whether this rank has ended by an error.
        interruption: failure report of another rank, which ends this rank's step.
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
        self._recording: Recording | None = None  # recording of the running step
        self._records_reductions = False
        self._has_begun = False  # whether the first step has begun
        # `time.monotonic` seconds at the end of the latest step; None within a step.
        self._left: float | None = None
        # The references are weak, so that a thread which may have to close connections does not
        # keep unused ones alive.
        self._connections: list[weakref.ref[Closable]] = []

    @classmethod
    def before_exchange(cls, pipeline: dist.ProcessGroup, *, limits_host: bool = True) -> Recorder:
        """Return a recorder of this rank, before ranks exchange their identities.

        ``limits_host``: whether the device holds back a host that runs too far ahead.
        """
        device = None if limits_host else unhindered()
        return cls(pipeline.rank(), first_identity(pipeline), device)

    def begin(self, iteration: int) -> None:
        """Note that the following actions belong to ``iteration``."""
        self.rank_identity = replace(self.rank_identity, iteration=iteration)
        self._has_begun, self._left = True, None

    def leave(self) -> None:
        """Note that the step is over, and that the caller does other work now."""
        self._left = time.monotonic()

    def add_connection(self, connection: Closable) -> None:
        """Register ``connection``, to be closed when a step fails on this rank or another."""
        self._connections.append(weakref.ref(connection))

    def connections(self) -> list[Closable]:
        """Return the registered connections that are still in use."""
        return [made for reference in self._connections if (made := reference()) is not None]

    def record(self, clock: Clock, *, with_reductions: bool = False) -> Recording:
        """Return the recording of the passes from now until `end`; callers in one step share it."""
        if self._recording is None:
            self._recording = Recording(self.rank, clock)
        self._records_reductions |= with_reductions
        return self._recording

    def reducing(self, stage: int) -> RecordedReduction | None:
        """Return the record of a gradient reduction of ``stage`` that begins now.

        None if reductions are not recorded.
        """
        if self._recording is None or not self._records_reductions:
            return None
        return self._recording.begin_reduction(stage)

    def end(self) -> None:
        """Stop recording passes, until `record` is called for another step."""
        self._recording, self._records_reductions = None, False

    def computing(self, action: Action | OverlappedPasses) -> AbstractContextManager[None]:
        """Context in which the rank runs the pass ``action``, or two overlapped passes."""
        position = Position(self.rank, action, None, "", time.monotonic())
        stay = _Stay(self, position)
        if self._recording is not None:
            stay = _RecordedStay(self, position, self._recording)
        if self.counting is not None:
            return _counted(stay, self.counting, passes_of(action))
        return stay

    def forget(self) -> None:
        """Discard the records of the current step, because the step restarts."""
        if self._recording is not None:
            self._recording.forget()

    def waiting(
        self, action: Action | str, peer: int, direction: str
    ) -> AbstractContextManager[None]:
        """Context in which the rank waits for ``action``, a message; arguments as in `Position`."""
        return _Stay(self, Position(self.rank, action, peer, direction, time.monotonic()))

    def failed(self, error: BaseException, action: Action | OverlappedPasses | str) -> None:
        """Note that the step ends by ``error`` in ``action``, and report it to the other ranks.

        ``action`` may also be the name of a place outside the passes.
        """
        self._end(error, f"in {action}")

    def failed_between_steps(self, error: BaseException) -> None:
        """Note that ``error`` ends this process outside a step, and report it to the other ranks.

        Nothing is reported if a step has ended by an error before. If the error comes from waiting
        for a rank that is gone, a note says why that rank has gone.
        """
        if self.has_failed:
            return
        failed, ended = self.why_gone() if isinstance(error, RuntimeError) else ("", "")
        self._end(error, self._between)
        if failed:
            error.add_note(f"megatron_ext: another rank had failed: {failed}")
        elif ended:
            error.add_note(f"megatron_ext: a rank has ended without an error: {ended}")

    def _end(self, error: BaseException, where: str) -> None:
        self.has_failed = True
        where = f"pipeline rank {self.rank}, {where} {self.rank_identity.note()}"
        error.add_note(f"megatron_ext: {where}")
        if self.failure_report is not None:
            self.failure_report.leave(f"{where}: {type(error).__name__}: {error}")

    def why_gone(self, *peers: int) -> tuple[str, str]:
        """Return why one of the pipeline ranks ``peers`` may be gone (`FailureReport.why_gone`).

        Without ``peers`` all ranks of the pipeline are looked up.
        """
        if self.failure_report is None:
            return "", ""
        processes = self.rank_identity.processes
        gone = [processes[peer] for peer in peers] if peers and processes else processes
        return self.failure_report.why_gone([process.global_rank for process in gone])

    @property
    def _between(self) -> str:
        """Description of a host that is in no pass and in no wait."""
        if not self._has_begun:
            return "before its first step"
        if self._left is None:
            return "between passes"
        return f"between steps for {time.monotonic() - self._left:.1f} s"

    def report(self) -> str:
        """Return the positions of this rank's host and device, in words."""
        position, device = self.position, self.device.position
        host = f"pipeline rank {self.rank} {self._between}" if position is None else str(position)
        its_device = "" if device is None else f"; its device {device}"
        peers = [*(position.peers if position else ()), *(device.pending.peers if device else ())]
        return f"{host}{its_device} {self.rank_identity.note(*peers)}"


class _Stay:
    """Context in which a rank is at a position.

    A context is made for each action; a generator would cost more.
    """

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
    """Context of a pass whose begin and end are recorded."""

    __slots__ = ("_began", "_recording")

    def __init__(self, recorder: Recorder, position: Position, recording: Recording) -> None:
        super().__init__(recorder, position)
        self._recording = recording

    def __enter__(self) -> None:
        super().__enter__()
        self._began = self._recording.clock.record_event()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        action = self._position.action
        assert not isinstance(action, str), "a connection is no pass"
        self._recording.add_pass(action, self._began)
        super().__exit__(kind, error, trace)
