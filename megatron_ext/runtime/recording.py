"""Start and end times of the passes and reductions of one step on this rank.

On a GPU events are device events on the computing stream: nothing is synchronized while the
passes run, and all events are read after the step. On the CPU they are `time.perf_counter`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.schedule.action import Action, OverlappedPasses
from megatron_ext.schedule.timeline import Event, GradientReduction


class HostClock:
    """Clock for passes on the CPU, which have finished when their call returns."""

    def record_event(self) -> Any:
        return time.perf_counter()

    def read(self, events: Sequence[Any]) -> list[float]:
        """Return the times of ``events`` in `time.perf_counter` seconds."""
        return list(events)

    def has_passed(self, event: Any) -> bool:
        """Return whether the device has reached the event; never waits."""
        return True

    def seconds(self, first: Any, later: Any) -> float:
        """Return the seconds between two events that `has_passed`; never waits."""
        return later - first


class DeviceClock:
    """Clock for passes that a GPU runs asynchronously, by events on the current stream."""

    def record_event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, events: Sequence[Any]) -> list[float]:
        """Return the times of ``events`` in `time.perf_counter` seconds.

        Waits until the device has done all work launched so far.
        """
        torch.cuda.synchronize()
        reference = self.record_event()
        reference.synchronize()
        now = time.perf_counter()
        return [now - event.elapsed_time(reference) / 1e3 for event in events]

    def has_passed(self, event: Any) -> bool:
        return event.query()

    def seconds(self, first: Any, later: Any) -> float:
        return first.elapsed_time(later) / 1e3


Clock = HostClock | DeviceClock


def clock_of(device: torch.device) -> Clock:
    """Return the clock that times passes on ``device``."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class RecordedReduction:
    """Record of one reduction of a stage's gradients, which consists of torch.distributed works."""

    def __init__(self, stage: int, clock: Clock) -> None:
        self.stage = stage
        self.began = clock.record_event()
        # Events at the ends of the reduction's works. The reduction ends with the latest event.
        self.ends: list[Any] = []
        self.is_exact = True
        self._clock = clock
        self._futures: list[torch.futures.Future[None]] = []

    def ends_with(self, work: Any) -> bool:
        """Record when ``work`` completes; return False if it does not signal completion.

        Some of gloo's works do not.
        """
        try:
            future = work.get_future()
        except (RuntimeError, AttributeError):
            return False
        self._futures.append(future.then(self._mark_end))
        return True

    def was_awaited(self) -> None:
        """Note that a wait for works which do not signal completion has returned now."""
        self.is_exact = False
        self.ends.append(self._clock.record_event())

    def wait_for_ends(self) -> None:
        """Wait for the works that signal completion; no further event is added afterwards."""
        for future in self._futures:
            future.wait()

    def _mark_end(self, future: torch.futures.Future[Any]) -> None:
        # With NCCL `wait` returns at once, and the current stream waits for the collective.
        self.ends.append(self._clock.record_event())


@dataclass(frozen=True)
class _Pass:
    """Recorded pass with the marks of its begin and end.

    Two overlapped passes have the same marks, and each has a ``share`` of the time between the
    marks, the backward pass after the forward pass.
    """

    action: Action
    began: Any
    ended: Any
    share: tuple[float, float] = (0.0, 1.0)

    def of(self, began: float, ended: float) -> tuple[float, float]:
        """Return begin and end of this pass in seconds, given the times of its marks."""
        if self.share == (0.0, 1.0):
            return began, ended
        first, last = (began + share * (ended - began) for share in self.share)
        return first, last


class Recording:
    """Record of the passes and gradient reductions of one step on one rank."""

    def __init__(self, rank: int, clock: Clock) -> None:
        self.clock = clock
        self._rank = rank
        self._passes: list[_Pass] = []
        self._reductions: list[RecordedReduction] = []

    def add_pass(self, action: Action | OverlappedPasses, began: Any) -> None:
        """Add the pass ``action``, which began at ``began`` and ends now."""
        ended, passes = self.clock.record_event(), passes_of(action)
        for number, part in enumerate(passes):
            share = number / len(passes), (number + 1) / len(passes)
            self._passes.append(_Pass(part, began, ended, share))

    def forget(self) -> None:
        """Discard the records of all passes and reductions."""
        self._passes.clear()
        self._reductions.clear()

    def begin_reduction(self, stage: int) -> RecordedReduction:
        """Add a reduction of ``stage``'s gradients that begins now."""
        reduction = RecordedReduction(stage, self.clock)
        self._reductions.append(reduction)
        return reduction

    def has_ended(self) -> bool:
        """Return whether the device has finished all passes.

        The methods `actions`, `busy`, `span` and `times` require it, and none of them waits.
        """
        return not self._passes or self.clock.has_passed(self._passes[-1].ended)

    def actions(self) -> tuple[Action, ...]:
        """Return the recorded passes, in the order in which they ran."""
        return tuple(entry.action for entry in self._passes)

    def busy(self) -> float:
        """Return the total seconds of all passes, without waits between them."""
        return sum(
            (entry.share[1] - entry.share[0]) * self.clock.seconds(entry.began, entry.ended)
            for entry in self._passes
        )

    def span(self) -> float:
        """Return the seconds from the start of the first pass to the end of the last."""
        return self.clock.seconds(self._passes[0].began, self._passes[-1].ended)

    def times(self, passes: Sequence[int]) -> list[float]:
        """Return begin and end of these passes, in seconds after the first begin of the step."""
        start, times = self._passes[0].began, list[float]()
        for entry in (self._passes[number] for number in passes):
            began, ended = (
                self.clock.seconds(start, event) for event in (entry.began, entry.ended)
            )
            times += entry.of(began, ended)
        return times

    def read(self) -> tuple[list[Event], list[GradientReduction]]:
        """Return the records of a step's passes and gradient reductions.

        Call it after the step. It blocks until the device has run all passes and reductions. A
        reduction is omitted if its backend has not reported when it ended.
        """
        for reduction in self._reductions:
            reduction.wait_for_ends()
        with_end = [reduction for reduction in self._reductions if reduction.ends]
        recorded = [
            *(event for entry in self._passes for event in (entry.began, entry.ended)),
            *(event for reduction in with_end for event in (reduction.began, *reduction.ends)),
        ]
        times = iter(self.clock.read(recorded))
        events = [
            Event(self._rank, entry.action, *entry.of(next(times), next(times)))
            for entry in self._passes
        ]
        reductions = []
        for reduction in with_end:
            start = next(times)
            end = max(next(times) for _ in reduction.ends)
            reductions.append(
                GradientReduction(self._rank, reduction.stage, start, end, reduction.is_exact)
            )
        return events, reductions


def passes_of(action: Action | OverlappedPasses) -> tuple[Action, ...]:
    """Return the passes of ``action``: itself, or the two of overlapped passes."""
    return tuple(action) if isinstance(action, OverlappedPasses) else (action,)
