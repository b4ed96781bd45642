"""Timelines: start and end of each action, as the simulator predicts or the recorder measures.

Predictions and measurements have one form, so that they can be compared, drawn and explained by the
same code. A step has two lengths: its makespan, and its span if steps overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron_ext.schedule.action import Action
from megatron_ext.schedule.schedule import Schedule, is_compute


class Event(NamedTuple):
    """Start and end, in seconds, of one ``action`` of a schedule on ``rank``."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class GradientReduction:
    """The data-parallel reduction of ``stage``'s gradients on ``rank``, in seconds.

    If ``is_exact`` is False, the moment of its end is not known: ``end`` is then the later time at
    which a wait for the reduction returned.
    """

    rank: int
    stage: int
    start: float
    end: float
    is_exact: bool = True


@dataclass(frozen=True)
class Timeline:
    """Start and end of each action in one step of ``schedule``, rank after rank.

    ``reductions`` of gradients are known only for a measured step, if they overlap the passes.
    """

    schedule: Schedule
    events: tuple[Event, ...]
    reductions: tuple[GradientReduction, ...] = ()

    @cached_property
    def compute(self) -> tuple[tuple[Event, ...], ...]:
        """Events (start and end) of the compute passes, by rank."""
        rows: list[list[Event]] = [[] for _ in self.schedule.rows]
        for event in self.events:
            if is_compute(event.action):
                rows[event.rank].append(event)
        return tuple(tuple(row) for row in rows)

    @property
    def start(self) -> float:
        """Time at which the step's first pass starts, in seconds."""
        return min(row[0].start for row in self.compute if row)

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end over all ranks: the cost of a step with a
        synchronous optimizer."""
        return max(row[-1].end for row in self.compute if row) - self.start

    @property
    def span(self) -> float:
        """Longest time from a rank's own first start to its own last end, over all ranks.

        This is the cost of a step if steps overlap (the measure of the zero-bubble papers).
        """
        return max(row[-1].end - row[0].start for row in self.compute if row)

    @property
    def work(self) -> float:
        """Seconds of compute passes on a rank, averaged over ranks."""
        busy = sum(event.end - event.start for row in self.compute for event in row)
        return busy / len(self.compute)

    @property
    def bubble_share_makespan(self) -> float:
        """Share of the makespan that a rank is idle, averaged over ranks.

        The makespan is the time from the first start to the last end over all ranks.
        """
        return 1 - self.work / self.makespan

    @property
    def bubble_share_span(self) -> float:
        """Share of the span that a rank is idle, averaged over ranks.

        The span is the longest time from a rank's own start to its own end.
        """
        return 1 - self.work / self.span

    def moved(self, start: float, factor: float = 1.0) -> Timeline:
        """Return a copy of the timeline whose first pass starts at ``start``.

        Times after that are ``factor`` times as long.
        """

        first = self.start

        def at(time: float) -> float:
            return start + (time - first) * factor

        return replace(
            self,
            events=tuple(e._replace(start=at(e.start), end=at(e.end)) for e in self.events),
            reductions=tuple(replace(r, start=at(r.start), end=at(r.end)) for r in self.reductions),
        )
