"""When the passes and reductions of one step ran on this rank.

On a GPU the marks are device events on the stream that computes: nothing is synchronised while the
passes run, and all are read after the step. On the CPU they are `time.perf_counter`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megatron_ext.schedule.action import Action
from megatron_ext.schedule.timeline import Event, Reduction


class Clock(Protocol):
    """Takes marks now, and tells later what time they were: `time.perf_counter` seconds."""

    def mark(self) -> Any: ...
    def read(self, marks: Sequence[Any]) -> list[float]: ...


class HostClock:
    """The clock for passes that have ended when their call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def read(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class DeviceClock:
    """The clock for passes that a GPU runs later."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Waits until the device has done all that it was given."""
        torch.cuda.synchronize()
        reference = self.mark()
        reference.synchronize()
        now = time.perf_counter()
        return [now - mark.elapsed_time(reference) / 1e3 for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock by which passes on ``device`` are timed."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class RecordedReduction:
    """The reduction of a stage's gradients, which consists of works of torch.distributed."""

    def __init__(self, stage: int, clock: Clock) -> None:
        self.stage = stage
        self.began = clock.mark()
        self.ends: list[Any] = []  # a mark for each work; the latest counts
        self.is_exact = True
        self._clock = clock
        self._futures: list[torch.futures.Future[None]] = []

    def ends_with(self, work: Any) -> bool:
        """Mark when ``work`` is done. False if it does not tell: some of gloo's do not."""
        try:
            future = work.get_future()
        except (RuntimeError, AttributeError):
            return False
        self._futures.append(future.then(self._mark_end))
        return True

    def was_awaited(self) -> None:
        """Somebody has waited for works that do not tell when they are done, until now."""
        self.is_exact = False
        self.ends.append(self._clock.mark())

    def settle(self) -> None:
        """Wait for the works that tell when they are done; no further mark will come then."""
        for future in self._futures:
            future.wait()

    def _mark_end(self, future: torch.futures.Future[Any]) -> None:
        # With NCCL this runs at once, on a stream that waits for the work.
        self.ends.append(self._clock.mark())


class Recording:
    """One step on one rank."""

    def __init__(self, rank: int, clock: Clock) -> None:
        self.clock = clock
        self._rank = rank
        self._passes: list[tuple[Action, Any, Any]] = []
        self._reductions: list[RecordedReduction] = []

    def add_pass(self, action: Action, began: Any) -> None:
        """``action`` ends now."""
        self._passes.append((action, began, self.clock.mark()))

    def forget(self) -> None:
        """Drop what was added so far."""
        self._passes.clear()
        self._reductions.clear()

    def begin_reduction(self, stage: int) -> RecordedReduction:
        """Note a reduction that begins now."""
        reduction = RecordedReduction(stage, self.clock)
        self._reductions.append(reduction)
        return reduction

    def read(self) -> tuple[list[Event], list[Reduction]]:
        """All that was recorded, after the step and its reductions have ended.

        A reduction of which no end is known is left out.
        """
        for reduction in self._reductions:
            reduction.settle()
        with_end = [reduction for reduction in self._reductions if reduction.ends]
        marks = [
            *(mark for _, began, ended in self._passes for mark in (began, ended)),
            *(mark for reduction in with_end for mark in (reduction.began, *reduction.ends)),
        ]
        times = iter(self.clock.read(marks))
        events = [
            Event(self._rank, action, next(times), next(times)) for action, _, _ in self._passes
        ]
        reductions = []
        for reduction in with_end:
            start = next(times)
            end = max(next(times) for _ in reduction.ends)
            reductions.append(
                Reduction(self._rank, reduction.stage, start, end, reduction.is_exact)
            )
        return events, reductions
