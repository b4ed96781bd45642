"""Seconds of a step with pairs of passes, under Megatron's interleaved schedule and ours, each with
its best layout."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from megatron_ext.compile.registry import choose, entry_of
from megatron_ext.cost_model.messages.hidden import PairedLayer, paired_layers
from megatron_ext.cost_model.model import Stage
from megatron_ext.cost_model.rates import Rates
from megatron_ext.planner.layouts.descent import Start, Timed, descend
from megatron_ext.planner.layouts.figures import StageFigures
from megatron_ext.planner.layouts.layout import Layout, evenly
from megatron_ext.planner.layouts.minimax import least_slowest_stage, with_even_ranks
from megatron_ext.planner.layouts.work import Work, evaluate
from megatron_ext.progress import Task
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, OverlapCosts
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Schedule
from scripts.recipes.gains import Configuration, work_of

_SCHEDULES = 3  # whose layouts are made better
_NEAR = 1.03  # times the best step: a layout that may lead to a better one


@dataclass(frozen=True)
class Step:
    """Step of a schedule with a layout.

    Attributes:
        layers: layers of each stage.
        seconds: seconds of a step: of its passes, and of everything else.
        fullest: bytes of the rank that holds most.
        paired: share of F that run as a pair with a backward pass.
    """

    schedule: str
    layers: tuple[int, ...]
    seconds: float
    fullest: float
    paired: float


def with_overlap(
    configuration: Configuration, rates: Rates, share: float, *, is_stock: bool
) -> Work:
    """Return the work of ``configuration`` in pairs, if ``share`` of experts' messages can overlap
    other work.

    Args:
        is_stock: whether whole backward passes outside of pairs hide messages behind their own W,
            as in Megatron's own plans with ``--delay-wgrad-compute``.
    """
    execution = replace(configuration.execution, overlap=share)
    work = replace(work_of(configuration, execution), pairs=True)

    def costs_of(stages: Sequence[Stage], placement: Placement) -> Costs:
        """Return the costs of ``work``, with the messages that B hides by itself."""
        costs = work.costs_of(stages, placement)
        hidden = costs.overlap.hidden[_B]
        layers = [paired_layers(work.model, stage, execution, rates) for stage in stages]
        alone = [_hidden_alone(of_stage, share) for of_stage in layers]
        more = [[max(h - a, 0.0) for h, a in zip(row, alone, strict=True)] for row in hidden]
        spared = [costs.spared_on(stage) + a for stage, a in enumerate(alone)]
        return replace(
            costs.with_passes(spared=tuple(spared)),
            overlap=OverlapCosts({_B: tuple(map(tuple, more))}),
        )

    if not is_stock or configuration.is_frozen:
        return work
    return replace(work, costs_of=costs_of)


_B = Kind.FULL_BACKWARD


def _hidden_alone(layers: Sequence[PairedLayer], share: float) -> float:
    return sum(min(share * la.input_gradient_messages, la.weight_gradient) for la in layers)


class Comparison:
    """Schedules for ``work``, each with its best layout within ``room`` bytes of a rank.

    Attributes:
        found: the step of each of ``specs`` that fits, by spec.
    """

    def __init__(self, work: Work, room: float | None, specs: Iterable[str]) -> None:
        self._work, self._room = work, room
        self._figures = StageFigures(work)
        layers = len(work.model.layers)
        stages = {spec: choose(spec).place(work.ranks).stages for spec in specs}
        self._stages = {spec: of for spec, of in stages.items() if of <= layers + 1}
        self._timed = cache(self._ordered)  # which passes are pairs depends on the layout
        self._starts: dict[str, Start] = {}
        self._tried: dict[str, set[Layout]] = defaultdict(set)  # begun with, or found
        self.found: dict[str, Step] = {}

    @property
    def best(self) -> Step | None:
        """The shortest of the steps found; None if no schedule fits."""
        return min(self.found.values(), key=_seconds, default=None)

    def simulated(self) -> Step | None:
        """The shortest of the steps found if messages wait for one another, as they do when run."""
        best: Step | None = None
        for step in sorted(self.found.values(), key=_seconds):
            if best is not None and best.seconds <= step.seconds:
                break
            with contextlib.suppress(ValueError):  # it does not fit
                best = min(filter(None, (best, self._as_it_runs(step))), key=_seconds)
        return best

    def _as_it_runs(self, step: Step) -> Step:
        """Raises ValueError if it does not fit."""
        room = self._room if entry_of(step.schedule).traits.uses_costs else None
        made = evaluate(self._work, step.schedule, Layout(step.layers), room=room, search=False)
        if self._room is not None and made.fullest > self._room:
            raise ValueError(f"{made.fullest:.3g} bytes, and {self._room:.3g} may be held")
        paired = made.candidate.report.share_in_pairs
        if self._work.pairs and not paired:  # it takes less without, and is to have some
            return step
        return Step(step.schedule, step.layers, made.seconds, made.fullest, paired)

    @property
    def layouts(self) -> list[Layout]:
        """Layouts of the steps that were found."""
        return [Layout(step.layers) for step in self.found.values()]

    def start(self, known: Sequence[Layout]) -> None:
        """Try balanced layouts and the ``known`` ones, and search on from the best of the schedules
        that take least with them."""
        for spec in self._stages:
            with contextlib.suppress(ValueError):
                options = [*self._balanced(spec), *self._of_stages(spec, known)]
                self._starts[spec] = self._timed(spec, options[0]).best_of(options)
        for start in sorted(self._starts.values(), key=_least):
            self._descend(start)
            if len(self.found) == _SCHEDULES:
                break

    def go_on_from(self, known: Sequence[Layout]) -> None:
        """Search on from ``known`` layouts that nearly reach the best ones found."""
        for spec, step in list(self.found.items()):
            layout = Layout(step.layers)
            timed = self._timed(spec, layout)
            others = [la for la in self._of_stages(spec, known) if la not in self._tried[spec]]
            if not others:
                continue
            start = timed.best_of(others)
            if start.fits and start.seconds < _NEAR * timed.best_of([layout]).seconds:
                self._descend(start)

    def of(self, spec: str, known: Layout) -> Step | None:
        """Return ``spec`` with its best layout, searched for also from a ``known`` one."""
        if spec not in self.found and spec in self._starts:
            self._descend(self._starts[spec])
            self.go_on_from([known])
        return self.found.get(spec)

    def step(self, spec: str, layout: Layout) -> Step:
        """Return the step of ``spec`` with ``layout``, whether it fits or not.

        Raises:
            ValueError: there is no such schedule.
        """
        timed, counts = self._timed(spec, layout), np.array([layout.layers], dtype=np.int64)
        model = self._work.variant(spec, layout).model
        assert model is not None
        return Step(
            spec,
            layout.layers,
            float(timed.seconds(counts)[0]) + max(map(self._work.seconds_outside_passes, model)),
            float(timed.fullest_bytes(counts)[0]),
            _share_in_pairs(timed.schedule),
        )

    def _ordered(self, spec: str, layout: Layout) -> Timed:
        return Timed(spec, layout, self._figures, self._room)

    def _balanced(self, spec: str) -> Iterator[Layout]:
        placement, layers = choose(spec).place(self._work.ranks), len(self._work.model.layers)
        for balanced_by in dict.fromkeys([self._figures, self._figures.after_overlap]):
            balanced = least_slowest_stage(layers, placement, balanced_by)
            yield balanced
            yield with_even_ranks(balanced, placement, self._work.microbatches, balanced_by)
        yield evenly(layers, placement.stages)

    def _of_stages(self, spec: str, known: Iterable[Layout]) -> list[Layout]:
        return list(dict.fromkeys(la for la in known if la.stages == self._stages[spec]))

    def _descend(self, start: Start) -> None:
        """Make ``start`` better, and keep it if it is the best of its schedule."""
        spec, layouts = start.spec, [start.layout]
        with contextlib.suppress(ValueError):  # of an order for another layout
            layouts.append(descend(partial(self._timed, spec), start.layout, Task("")).layout)
        self._tried[spec] |= set(layouts)
        made = [self._timed(spec, layout).best_of([layout]) for layout in layouts]
        steps = [self.step(spec, start.layout) for start in made if start.fits]
        if spec in self.found:
            steps.append(self.found[spec])
        if steps:
            self.found[spec] = min(steps, key=_seconds)


def _seconds(step: Step) -> float:
    return step.seconds


def _least(start: Start) -> tuple[bool, float]:
    """Return a sort key: layouts that fit come first, the shortest before others; then those that
    nearly fit."""
    return not start.fits, start.seconds if start.fits else start.fullest


def _share_in_pairs(schedule: Schedule) -> float:
    forwards = sum(action.kind is Kind.FORWARD for row in schedule.rows for action in row)
    return len(schedule.pairs) / forwards
