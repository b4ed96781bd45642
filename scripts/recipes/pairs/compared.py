"""What a step of a recipe takes with pairs and without, under Megatron's schedule and ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.schedule.plan.layouts.descent import Start, Timed, descend
from megatron_ext.schedule.plan.layouts.figures import Counts, Floats, StageFigures, busy
from megatron_ext.schedule.plan.layouts.layout import Layout, evenly
from megatron_ext.schedule.plan.layouts.minimax import least_slowest_stage, with_even_ranks
from megatron_ext.schedule.plan.layouts.order import Order
from megatron_ext.schedule.plan.layouts.work import Work
from megatron_ext.schedule.progress import Task
from megatron_ext.schedule.schedule import Schedule
from scripts.recipes.pairs.hiding import Hiding
from scripts.recipes.pairs.order import PairedOrder
from scripts.recipes.pairs.schedules import Ordered, rows_of

_PERIODS = 6  # microbatches a rank, of a step that tells of a longer one
_OF_OTHERS = 1e-4


class PairedTimed(Timed):
    """As `Timed`, of an order with pairs."""

    def __init__(
        self,
        work: Work,
        ordered: Ordered,
        layout: Layout,
        figures: StageFigures,
        hiding: Hiding | None,
        room: float | None,
        periods: int = _PERIODS,
    ) -> None:
        self.spec = ordered.name
        self._figures, self._room = figures, room
        self._placement = ordered.placement(work.ranks)
        self._microbatches = work.microbatches
        costs = work.costs_of(layout.of(work.model), self._placement)
        full, rest = divmod(work.microbatches, work.ranks)
        self._orders = []
        for number in (min(full, periods), min(full, periods - 1)):
            microbatches = number * work.ranks + rest
            rows = rows_of(ordered, work, layout, microbatches, figures, hiding, room)
            order = PairedOrder(rows, self._placement, costs.hop, hiding, ordered.is_stock)
            self._orders.append((microbatches, order))
            if number == min(full, periods):
                schedule = Schedule(ordered.name, self._placement, tuple(map(tuple, rows)))
                self._order = Order(schedule, costs.hop, costs.message_bytes)
        self.paired_share = self._orders[0][1].paired_share

    def _figured(self, counts: Counts) -> tuple[Floats, Floats]:
        figures = self._figures.of(counts)
        work, stages_of = busy(figures), self._placement.stages_of
        ranks = np.stack([work[:, list(stages)].sum(axis=1) for stages in stages_of], axis=1)
        seconds = self.step(counts)
        seconds = seconds + _OF_OTHERS * self._microbatches * np.sqrt((ranks**2).mean(axis=1))
        if self._room is None:
            return seconds, np.zeros_like(seconds)
        return seconds, self._order.rank_bytes(figures).max(axis=1) / self._room

    def step(self, counts: Counts) -> Floats:
        """Seconds of the passes of a step, by layout."""
        figures = self._figures.of(counts)
        (longer, order), (shorter, other) = self._orders
        seconds = order.seconds(figures, counts)
        if self._microbatches == longer:
            return seconds
        a_microbatch = (seconds - other.seconds(figures, counts)) / (longer - shorter)
        return np.asarray(seconds + (self._microbatches - longer) * a_microbatch)

    def fullest(self, counts: Counts) -> Floats:
        """Bytes of the rank that holds most, by layout."""
        return np.asarray(self._order.rank_bytes(self._figures.of(counts)).max(axis=1))


@dataclass(frozen=True)
class Step:
    """Of a schedule with a layout.

    Attributes:
        seconds: of a step: its passes, and what comes on top of them.
        fullest: bytes of the rank that holds most.
        paired_share: of F and backward passes, how many run in pairs.
    """

    schedule: str
    layers: tuple[int, ...]
    seconds: float
    fullest: float
    paired_share: float


class Comparison:
    """Of the training ``work``, where experts' messages are hidden as ``hiding`` says."""

    def __init__(self, work: Work, hiding: Hiding | None, figures: StageFigures) -> None:
        self._work, self._hiding, self._figures = work, hiding, figures

    def step(self, ordered: Ordered, layout: Layout, room: float | None = None) -> Step:
        """With ``layout``."""
        timed = PairedTimed(
            self._work, ordered, layout, self._figures, self._hiding, room, periods=10
        )
        counts = np.array([layout.layers])
        model = self._work.variant(ordered.spec, layout).model
        assert model is not None
        return Step(
            ordered.name,
            layout.layers,
            float(timed.step(counts)[0]) + max(map(self._work.seconds_beside, model)),
            float(timed.fullest(counts)[0]),
            timed.paired_share,
        )

    def best(
        self, candidates: Sequence[Ordered], room: float, known: Sequence[Layout]
    ) -> Step | None:
        """The shortest of ``candidates`` with any layout, within ``room`` bytes of a rank."""
        made = []
        for ordered in candidates:
            start = self._start(ordered, room, known)
            if start is None or not start.fits:
                continue
            step = self.step(ordered, start.layout, room)
            if step.fullest <= room:
                made.append(step)
        return min(made, key=lambda step: step.seconds, default=None)

    def _start(self, ordered: Ordered, room: float, known: Sequence[Layout]) -> Start | None:
        placement = ordered.placement(self._work.ranks)
        layers = len(self._work.model.layers)
        if placement.stages > layers + 1:
            return None
        balanced = least_slowest_stage(layers, placement.stages, self._figures)
        even = with_even_ranks(balanced, placement, self._work.microbatches, self._figures)
        options = [even, balanced, *(l for l in known if l.stages == placement.stages)]
        if layers % placement.stages == 0:
            options.append(evenly(layers, placement.stages))

        def make(layout: Layout) -> PairedTimed:
            return PairedTimed(
                self._work, ordered, layout, self._figures, self._hiding, room
            )

        try:
            first = make(even).best_of(options)
            return descend(make, first.layout, Task(""))
        except ValueError:
            return None
