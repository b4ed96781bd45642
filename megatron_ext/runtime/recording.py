"""When the passes and reductions of one step ran on this rank.

On a GPU the marks are device events on the stream that computes: nothing is synchronised while the
passes run, and all are read after the step. On the CPU they are `time.perf_counter`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_ext.schedule.action import Action, Pair
from megatron_ext.schedule.timeline import Event, GradientReduction


class Clock(Protocol):
    """Takes marks now, and tells later what time they were: `time.perf_counter` seconds."""

    def mark(self) -> Any: ...
    def read(self, marks: Sequence[Any]) -> list[float]: ...

    def has_passed(self, mark: Any) -> bool:
        """Whether it is that time; waits for nothing."""
        ...

    def seconds(self, first: Any, later: Any) -> float:
        """Between two marks that `has_passed`; waits for nothing."""
        ...


class HostClock:
    """The clock for passes that have ended when their call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def read(self, marks: Sequence[float]) -> list[float]:
        return list(marks)

    def has_passed(self, mark: float) -> bool:
        return True

    def seconds(self, first: float, later: float) -> float:
        return later - first


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

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, first: torch.cuda.Event, later: torch.cuda.Event) -> float:
        return first.elapsed_time(later) / 1e3


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

    def wait_for_ends(self) -> None:
        """Wait for the works that tell when they are done; no further mark will come then."""
        for future in self._futures:
            future.wait()

    def _mark_end(self, future: torch.futures.Future[Any]) -> None:
        # With NCCL this runs at once, on a stream that waits for the work.
        self.ends.append(self._clock.mark())


@dataclass(frozen=True)
class _Pass:
    """A pass, and the marks when it began and ended. Two that run as one have these in common, and
    each its ``share`` of the time between them, the second behind the first."""

    action: Action
    began: Any
    ended: Any
    share: tuple[float, float] = (0.0, 1.0)

    def of(self, began: float, ended: float) -> tuple[float, float]:
        """When it began and ended, if its marks were at these times."""
        if self.share == (0.0, 1.0):
            return began, ended
        first, last = (began + share * (ended - began) for share in self.share)
        return first, last


class Recording:
    """One step on one rank."""

    def __init__(self, rank: int, clock: Clock) -> None:
        self.clock = clock
        self._rank = rank
        self._passes: list[_Pass] = []
        self._reductions: list[RecordedReduction] = []

    def add_pass(self, action: Action | Pair, began: Any) -> None:
        """``action`` ends now."""
        ended, passes = self.clock.mark(), passes_of(action)
        for number, own in enumerate(passes):
            share = number / len(passes), (number + 1) / len(passes)
            self._passes.append(_Pass(own, began, ended, share))

    def forget(self) -> None:
        """Drop what was added so far."""
        self._passes.clear()
        self._reductions.clear()

    def begin_reduction(self, stage: int) -> RecordedReduction:
        """Note a reduction that begins now."""
        reduction = RecordedReduction(stage, self.clock)
        self._reductions.append(reduction)
        return reduction

    def has_ended(self) -> bool:
        """Whether the device has done all passes. Only then may one ask for what follows, and
        nothing of that waits."""
        return not self._passes or self.clock.has_passed(self._passes[-1].ended)

    def actions(self) -> tuple[Action, ...]:
        """The passes, in their order."""
        return tuple(own.action for own in self._passes)

    def busy(self) -> float:
        """Seconds of all passes together."""
        return sum(
            (own.share[1] - own.share[0]) * self.clock.seconds(own.began, own.ended)
            for own in self._passes
        )

    def span(self) -> float:
        """Seconds from the start of the first pass to the end of the last."""
        return self.clock.seconds(self._passes[0].began, self._passes[-1].ended)

    def times(self, passes: Sequence[int]) -> list[float]:
        """When those of these numbers began and ended, in seconds after the first began."""
        start, times = self._passes[0].began, list[float]()
        for own in (self._passes[number] for number in passes):
            began, ended = (self.clock.seconds(start, mark) for mark in (own.began, own.ended))
            times += own.of(began, ended)
        return times

    def read(self) -> tuple[list[Event], list[GradientReduction]]:
        """All that was recorded, after the step and its reductions have ended.

        A reduction of which no end is known is left out.
        """
        for reduction in self._reductions:
            reduction.wait_for_ends()
        with_end = [reduction for reduction in self._reductions if reduction.ends]
        marks = [
            *(mark for own in self._passes for mark in (own.began, own.ended)),
            *(mark for reduction in with_end for mark in (reduction.began, *reduction.ends)),
        ]
        times = iter(self.clock.read(marks))
        events = [
            Event(self._rank, own.action, *own.of(next(times), next(times))) for own in self._passes
        ]
        reductions = []
        for reduction in with_end:
            start = next(times)
            end = max(next(times) for _ in reduction.ends)
            reductions.append(
                GradientReduction(self._rank, reduction.stage, start, end, reduction.is_exact)
            )
        return events, reductions


def passes_of(action: Action | Pair) -> tuple[Action, ...]:
    """The passes that ``action`` is: one, or two that run as one."""
    return tuple(action) if isinstance(action, Pair) else (action,)
