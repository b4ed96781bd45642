"""What a step takes with pairs of passes, under Megatron's interleaved schedule and ours, each with
its best layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.build.output_layer import with_input_gradient
from megatron_ext.schedule.build.pairs import with_pairs
from megatron_ext.schedule.build.registry import Choice, choose, entry_of
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.model.messages.hidden import PairedLayer, paired_layers
from megatron_ext.schedule.model.model import Stage
from megatron_ext.schedule.model.rates import Rates
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.plan.layouts.descent import Timed, descend
from megatron_ext.schedule.plan.layouts.figures import Counts, Floats, StageFigures, busy
from megatron_ext.schedule.plan.layouts.layout import Layout, evenly
from megatron_ext.schedule.plan.layouts.minimax import least_slowest_stage, with_even_ranks
from megatron_ext.schedule.plan.layouts.order import Order
from megatron_ext.schedule.plan.layouts.work import Work
from megatron_ext.schedule.plan.planner import limit_left
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.progress import Task
from megatron_ext.schedule.schedule import Schedule
from scripts.recipes.gains import Configuration, work_of
from scripts.recipes.pairs.order import PERIODS, Hidden, PairedOrder

_OF_OTHERS = 1e-4  # what all ranks do counts beside the step


@dataclass(frozen=True)
class Step:
    """Of a schedule with a layout.

    Attributes:
        layers: of each stage.
        seconds: of a step: its passes, and what comes on top of them.
        fullest: bytes of the rank that holds most.
        paired: of all F, how many run beside a backward pass.
    """

    schedule: str
    layers: tuple[int, ...]
    seconds: float
    fullest: float
    paired: float


def with_overlap(
    configuration: Configuration, rates: Rates, share: float, *, is_stock: bool
) -> Work:
    """The work of ``configuration`` where so large a ``share`` of experts' messages can go on
    beside other work.

    Args:
        is_stock: whether whole backward passes outside of pairs hide messages behind their own W,
            as in Megatron's own plans with ``--delay-wgrad-compute``.
    """
    execution = replace(configuration.execution, overlap=share)
    work = work_of(configuration, execution)

    def costs_of(stages: Sequence[Stage], placement: Placement) -> Costs:
        """``work``'s, with what B hides by itself."""
        costs = work.costs_of(stages, placement)
        hidden = costs.hidden[_B]
        layers = [paired_layers(work.model, stage, execution, rates) for stage in stages]
        alone = [_hidden_alone(of_stage, share) for of_stage in layers]
        more = [[max(h - a, 0.0) for h, a in zip(row, alone, strict=True)] for row in hidden]
        spared = [costs.spared_on(stage) + a for stage, a in enumerate(alone)]
        return replace(costs, hidden={_B: tuple(map(tuple, more))}, spared=tuple(spared))

    if not is_stock or configuration.is_frozen:
        return work
    return replace(work, costs_of=costs_of)


_B = Kind.FULL_BACKWARD


def _hidden_alone(layers: Sequence[PairedLayer], share: float) -> float:
    return sum(min(share * la.input_gradient_messages, la.weight_gradient) for la in layers)


class Comparison:
    """Schedules for ``work``, within ``room`` bytes of a rank, with pairs or ``without``."""

    def __init__(self, work: Work, room: float | None, *, without: bool = False) -> None:
        self._work, self._room, self._without = work, room, without
        self._figures, self._hidden = StageFigures(work), Hidden(work)

    def best(self, specs: Iterable[str], known: Sequence[Layout]) -> Step | None:
        """The shortest of ``specs`` with any layout; layouts that are ``known`` are among those
        that are made better. None: none fits."""
        made = [step for spec in specs if (step := self._best_of(spec, known))]
        return min(made, key=lambda step: step.seconds, default=None)

    def step(self, spec: str, layout: Layout) -> Step:
        """Of ``spec`` with ``layout``.

        Raises:
            ValueError: it cannot be made so.
        """
        return self._timed(spec, layout).step(layout)

    def _timed(self, spec: str, layout: Layout) -> _PairedTimed:
        extras = {"pairs": not self._without}
        return _PairedTimed(spec, layout, self._figures, self._hidden, self._room, extras)

    def _best_of(self, spec: str, known: Sequence[Layout]) -> Step | None:
        placement, layers = choose(spec).place(self._work.ranks), len(self._work.model.layers)
        stages = placement.stages
        if stages > layers + 1:
            return None
        balanced = least_slowest_stage(layers, stages, self._figures)
        even = with_even_ranks(balanced, placement, self._work.microbatches, self._figures)
        options = [even, balanced, evenly(layers, stages)]
        options += [layout for layout in known if layout.stages == stages]
        make = cache(partial(self._timed, spec))  # which passes are pairs depends on the layout
        try:
            starts = [make(layout).best_of([layout]) for layout in dict.fromkeys(options)]
            first = min(starts, key=lambda start: (not start.fits, start.seconds))
            start = descend(make, first.layout, Task(""))
        except ValueError:
            return None
        return make(start.layout).step(start.layout) if start.fits else None


def _ordered(choice: Choice, problem: Problem, limit: MemoryLimit | None) -> Schedule:
    """The passes of ``choice``; within ``limit``, if it makes them by what there is room for."""
    if limit is not None and entry_of(choice.spec).uses_costs:
        within = replace(problem, memory_limit=limit)
        with contextlib.suppress(ValueError):  # it needs more, which other layouts may leave
            return with_pairs(choice.without_search.build(within), within)
    return with_pairs(choice.without_search.build(problem), problem)


class _PairedTimed(Timed):
    """As `Timed`, of an order with pairs."""

    def __init__(
        self,
        spec: str,
        layout: Layout,
        figures: StageFigures,
        hidden: Hidden,
        room: float | None,
        extras: Mapping[str, bool],
    ) -> None:
        work = figures.work
        variant = work.variant(spec, layout)
        self.spec = spec
        self._figures, self._room = figures, room
        self._placement, self._microbatches = variant.problem.placement, work.microbatches
        periods, rest = divmod(work.microbatches, work.ranks)
        self._short = min(periods, PERIODS) * work.ranks + rest
        problem = replace(
            variant.problem,
            microbatches=self._short,
            costs=with_input_gradient(variant.problem.costs),
        ).with_extras(**extras)
        schedule = _ordered(variant.choice, problem, limit_left(variant, room))
        self._paired = PairedOrder(schedule, problem.costs.hop, hidden)
        self._order = Order(schedule, problem.costs)
        self._share = len(schedule.pairs) / (self._short * self._placement.stages)

    def step(self, layout: Layout) -> Step:
        """With ``layout``."""
        counts = np.array([layout.layers], dtype=np.int64)
        figures = self._figures.of(counts)
        model = self._figures.work.variant(self.spec, layout).model
        assert model is not None
        passes = self._paired.seconds(figures, counts, self._microbatches - self._short)
        return Step(
            self.spec,
            layout.layers,
            float(passes[0]) + max(map(self._figures.work.seconds_beside, model)),
            float(self._order.rank_bytes(figures).max()),
            self._share,
        )

    def _figured(self, counts: Counts) -> tuple[Floats, Floats]:
        figures = self._figures.of(counts)
        work, stages_of = busy(figures), self._placement.stages_of
        ranks = np.stack([work[:, list(stages)].sum(axis=1) for stages in stages_of], axis=1)
        more = self._microbatches - self._short
        seconds = self._paired.seconds(figures, counts, more)
        seconds += _OF_OTHERS * self._microbatches * np.sqrt((ranks**2).mean(axis=1))
        if self._room is None:
            return seconds, np.zeros_like(seconds)
        return seconds, self._order.rank_bytes(figures).max(axis=1) / self._room
