"""What a step takes with pairs of passes, under Megatron's interleaved schedule and ours, each with
its best layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.build.output_layer import with_input_gradient
from megatron_ext.schedule.build.pairs import with_pairs
from megatron_ext.schedule.build.registry import choose, entry_of
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.model.model import Stage
from megatron_ext.schedule.model.pairs import PairedLayer, paired_layers
from megatron_ext.schedule.model.rates import Rates
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.plan.layouts.descent import Start, Timed, descend
from megatron_ext.schedule.plan.layouts.figures import Counts, Floats, StageFigures, busy
from megatron_ext.schedule.plan.layouts.layout import Layout, evenly
from megatron_ext.schedule.plan.layouts.minimax import least_slowest_stage, with_even_ranks
from megatron_ext.schedule.plan.layouts.order import Order
from megatron_ext.schedule.plan.layouts.work import Work
from megatron_ext.schedule.plan.planner import VocabMethod, consider, limit_left
from megatron_ext.schedule.progress import Task
from scripts.recipes.gains import Configuration, work_of
from scripts.recipes.pairs.order import PERIODS, Hidden, PairedOrder

_OF_OTHERS = 1e-4  # what all ranks do counts beside the step
_TIGHTER = 0.98  # of the room, where messages hold more than is estimated


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
    """Schedules with pairs, for ``work``, within ``room`` bytes of a rank."""

    def __init__(self, work: Work, room: float | None) -> None:
        self._work, self._room = work, room
        self._figures, self._hidden = StageFigures(work), Hidden(work)

    def best(self, specs: Iterable[str], known: Sequence[Layout]) -> Step | None:
        """The shortest of ``specs`` with any layout; layouts that are ``known`` are among those
        that are made better. None: none fits."""
        starts = [start for spec in specs if (start := self._start(spec, known))]
        for start in sorted(starts, key=lambda start: start.seconds):
            for share in (1.0, _TIGHTER):
                with contextlib.suppress(ValueError):
                    tighter = start if share == 1 else self._laid_out(start.spec, known, share)
                    return self.step(tighter.spec, tighter.layout)
        return None

    def _start(self, spec: str, known: Sequence[Layout]) -> Start | None:
        try:
            start = self._laid_out(spec, known)
        except ValueError:
            return None
        return start if start.fits else None

    def step(self, spec: str, layout: Layout) -> Step:
        """Of ``spec`` with ``layout``.

        Raises:
            ValueError: it cannot be made so.
        """
        variant = self._work.variant(spec, layout)
        variant = replace(variant, choice=variant.choice.without_search)
        ranks, microbatches = self._work.ranks, self._work.microbatches
        longer = PERIODS * ranks + microbatches % ranks
        numbers = (longer - ranks, longer) if microbatches >= 2 * longer else (microbatches,)
        made = [
            consider(
                replace(
                    variant,
                    problem=replace(variant.problem, microbatches=number).with_extras(pairs=True),
                ),
                VocabMethod.NAIVE,
                self._room,
            )
            for number in numbers
        ]
        *before, last = (candidate.step for candidate in made)
        more = (microbatches - longer) * (last - before[0]) / ranks if before else 0.0
        assert variant.model is not None
        report = made[-1].report
        return Step(
            spec,
            layout.layers,
            last + more + max(map(self._work.seconds_beside, variant.model)),
            made[-1].fullest or 0.0,
            report.pairs / (report.microbatches * report.pp * report.vpp),
        )

    def _laid_out(self, spec: str, known: Sequence[Layout], share: float = 1.0) -> Start:
        """``spec`` with its best layout, within so large a ``share`` of the room.

        Raises:
            ValueError: it cannot be made.
        """
        work, figures = self._work, self._figures
        placement, layers = choose(spec).place(work.ranks), len(work.model.layers)
        stages = placement.stages
        balanced = least_slowest_stage(layers, stages, figures)
        even = with_even_ranks(balanced, placement, work.microbatches, figures)
        options = [even, balanced, evenly(layers, stages)]
        options += [layout for layout in known if layout.stages == stages]
        room = self._room and share * self._room

        orders: dict[Layout | None, _PairedTimed] = {}

        def make(layout: Layout) -> _PairedTimed:
            key = layout if entry_of(spec).uses_costs else None
            if key not in orders:
                orders[key] = _PairedTimed(work, spec, layout, figures, self._hidden, room)
            return orders[key]

        return descend(make, make(even).best_of(options).layout, Task(""))


class _PairedTimed(Timed):
    """As `Timed`, of an order with pairs."""

    def __init__(
        self,
        work: Work,
        spec: str,
        layout: Layout,
        figures: StageFigures,
        hidden: Hidden,
        room: float | None,
    ) -> None:
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
            memory_limit=work.limit or limit_left(variant, room),
        ).with_extras(pairs=True)
        schedule = with_pairs(variant.choice.without_search.build(problem), problem)
        self._paired = PairedOrder(schedule, problem.costs.hop, hidden)
        self._order = Order(schedule, problem.costs)

    def _figured(self, counts: Counts) -> tuple[Floats, Floats]:
        figures = self._figures.of(counts)
        work, stages_of = busy(figures), self._placement.stages_of
        ranks = np.stack([work[:, list(stages)].sum(axis=1) for stages in stages_of], axis=1)
        more = self._microbatches - self._short
        seconds = self._paired.seconds(figures, counts, more)
        seconds = seconds + _OF_OTHERS * self._microbatches * np.sqrt((ranks**2).mean(axis=1))
        if self._room is None:
            return seconds, np.zeros_like(seconds)
        return seconds, self._order.rank_bytes(figures).max(axis=1) / self._room
