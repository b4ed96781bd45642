"""Prediction of the step time of our schedules from the costs of a measured step of Megatron's own.

Megatron's backward pass is not split, so the share of W is not measured but estimated. Each answer
is therefore a range, for a W that takes from 0.3 to 0.5 of B's time. Under another placement layers
lie on other stages, so the time of each part of the model is fitted to the measured passes. Parts
that the passes cannot separate keep the estimate's proportions.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_ext.base.progress import task
from megatron_ext.compile.build import build_program, complete
from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import FamilyEntry, Maturity, choose, entries
from megatron_ext.compile.size import seconds_to_build
from megatron_ext.observe.fitted_parts import BACKWARD, FORWARD, WEIGHT, ModelParts
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, LinkCosts, PassCosts
from megatron_ext.schedule.limit import MemoryLimit, fits
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.stock_executor import StockExecutor

SHARES = (0.3, 0.5)  # least and largest plausible share of W in B
SECONDS = 60.0
_WORTH = 0.001  # least gain, as a share of the time, for which a schedule may take more memory
# Factors on `seconds_to_build`, for families that ignore costs and for families that use them, if a
# schedule is built both with and without a memory limit. They were measured on 8 ranks.
_BUILT, _FITTED = 2, 12


def weight_shares(costs: Costs) -> tuple[float, ...]:
    """Return the share of W (weight gradient) in each stage's backward pass by ``costs``."""
    pairs = zip(
        costs.seconds[Kind.BACKWARD_INPUT], costs.seconds[Kind.BACKWARD_WEIGHT], strict=True
    )
    return tuple(w / (i + w) if i + w else 0.5 for i, w in pairs)


# Seconds of F and of B, and of W within B, by stage.
_Passes = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class TracedCosts:
    """Costs of Megatron's own schedule, measured in a trace, in seconds per stage.

    Attributes:
        schedule: the order of passes in the step, without messages. Backward passes are whole (B).
        microbatches: number of microbatches of the step.
        forward, backward: seconds of F and B.
        weight_shares: estimated share of W in B.
        message: seconds of a message.
        executor: how Megatron sends the messages of the step.
        parts: the layers and other parts of the stages; None: not known, and a stage's work is cut
            evenly.
    """

    schedule: Schedule
    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight_shares: tuple[float, ...]
    message: float
    executor: StockExecutor
    parts: ModelParts | None = None

    def costs(self, stages: int, share: float | None = None) -> Costs | None:
        """Return the measured costs for another number of stages; None if that is impossible.

        Layers are cut evenly, the embedding and the output layer stay at the ends, and multi-token
        prediction is on the last stage. If the parts of the stages are not known, the measured
        stages are split into equal parts or joined. ``share`` is the share of W in B; None takes
        the estimated one.
        """
        made = self._measured() if stages == len(self.backward) else self._moved(stages)
        if made is None:
            return None
        forward, backward, weight = made
        if share is not None:
            weight = tuple(share * full for full in backward)
        inputs = tuple(full - part for full, part in zip(backward, weight, strict=True))
        seconds = {
            Kind.FORWARD: forward,
            Kind.BACKWARD_INPUT: inputs,
            Kind.BACKWARD_WEIGHT: weight,
        }
        return Costs(
            PassCosts(seconds), LinkCosts(self.message), origin="measured of Megatron's own step"
        )

    def doubted(self) -> Iterator[TracedCosts]:
        """Yield these costs with other proportions of parts that passes cannot separate."""
        for parts in () if self.parts is None else self.parts.doubted():
            yield replace(self, parts=parts)

    def _measured(self) -> _Passes:
        shares = zip(self.backward, self.weight_shares, strict=True)
        return self.forward, self.backward, tuple(full * part for full, part in shares)

    def _moved(self, stages: int) -> _Passes | None:
        parts = self.parts
        if parts is None:
            if stages % len(self.backward) and len(self.backward) % stages:
                return None
            forward, backward, weight = (_cut(figures, stages) for figures in self._measured())
            return forward, backward, weight
        layers = parts.evenly(stages)
        if layers is None:
            return None
        forwards = parts.fitted(self.forward, FORWARD, layers)
        backwards = parts.fitted(self.backward, BACKWARD, layers)
        weights = parts.seconds(WEIGHT) / np.maximum(parts.seconds(BACKWARD), 1e-30)
        return (
            tuple(forwards.sum(1).tolist()),
            tuple(backwards.sum(1).tolist()),
            tuple((backwards @ weights).tolist()),
        )


def _cut(figures: Sequence[float], stages: int) -> tuple[float, ...]:
    if stages >= len(figures):
        parts = stages // len(figures)
        return tuple(figure / parts for figure in figures for _ in range(parts))
    joined = len(figures) // stages
    return tuple(sum(figures[at : at + joined]) for at in range(0, len(figures), joined))


@dataclass(frozen=True)
class Prospect:
    """Step time and memory of a schedule, predicted from a trace; ``--json`` prints these names.

    Attributes:
        vpp: chunks of a rank.
        step: seconds of a step, with the estimated W.
        low, high: the least and the largest step time that result if W has its estimate or either
            end of its range, and if parts that measured passes cannot separate have other
            proportions.
        of_stock: ``low`` and ``high`` relative to the predicted step of Megatron's own schedule.
        bubble_share: idle share of the makespan, with the estimated W.
        peak: activation memory of the rank that holds most, in microbatches.
    """

    schedule: str
    vpp: int
    step: float
    low: float
    high: float
    of_stock: tuple[float, float]
    bubble_share: float
    peak: float


@dataclass(frozen=True)
class WhatIf:
    """Megatron's own schedule and this package's, simulated with costs measured in a trace.

    Attributes:
        stock: the schedule that Megatron has run.
        within: schedules that hold no more than Megatron's own, shortest first.
        with_more: schedules with shorter steps that hold more, shortest first.
        excluded: by name of each other schedule, the reason why it is in neither of the two lists.
        has_parts: whether the times of layers, embedding and output layer are known separately.
        has_depths: whether those of layers of multi-token prediction are, too.
    """

    stock: Prospect
    within: tuple[Prospect, ...]
    with_more: tuple[Prospect, ...]
    excluded: Mapping[str, str]
    has_parts: bool = False
    has_depths: bool = False


def what_if(traced: TracedCosts, seconds: float = SECONDS) -> WhatIf:
    """Return the predicted step of each of this package's schedules, with costs from a trace.

    Schedules with another placement count too (a V has two stages a rank), although the launch
    would need other virtual stages for them. Schedules are ignored if predicting all of them would
    take longer than ``seconds``.
    """
    start = time.perf_counter()
    placement = traced.schedule.placement
    costs = traced.costs(placement.stages)
    assert costs is not None
    passes = traced.schedule
    problem = Problem(placement, traced.microbatches, costs, stock=traced.executor)
    program = complete(passes, problem)
    stock = _prospect(passes.name, program, traced, None)
    within: list[Prospect] = []
    with_more: list[Prospect] = []
    excluded: dict[str, str] = {}
    specs = list(_specs(placement))
    with task("comparing schedules with Megatron's own", len(specs)) as work:
        for entry, spec in specs:
            left = seconds - (time.perf_counter() - start)
            try:
                tried = list(_tried(entry, spec, traced, stock, left))
            except ValueError as error:
                excluded[spec] = str(error)
                tried = []
            for prospect in tried:
                (within if fits(prospect.peak, stock.peak) else with_more).append(prospect)
            work.done += 1
    return WhatIf(
        stock,
        _shortest_first(within),
        _shortest_first(with_more),
        excluded,
        traced.parts is not None,
        traced.parts is not None and traced.parts.has_depths,
    )


def _shortest_first(prospects: Sequence[Prospect]) -> tuple[Prospect, ...]:
    return tuple(sorted(prospects, key=lambda prospect: (prospect.step, prospect.peak)))


def _specs(placement: Placement) -> Iterator[tuple[FamilyEntry, str]]:
    """Yield the schedules that a launch with this ``placement`` could use, searches last."""
    for entry in sorted(entries().values(), key=lambda entry: entry.traits.searches):
        has_chunks = "vpp" in inspect.signature(entry.place).parameters
        if entry.maturity is Maturity.LABORATORY or (has_chunks and placement.chunks == 1):
            continue
        yield entry, f"{entry.name}:vpp={placement.chunks}" if has_chunks else entry.name


def _tried(
    entry: FamilyEntry, spec: str, traced: TracedCosts, stock: Prospect, left: float
) -> Iterator[Prospect]:
    """Yield a schedule, simulated with costs from a trace, without a memory limit.

    If the schedule holds more memory than ``stock``, Megatron's schedule, yield a version within
    the memory of ``stock``, and the version without a limit only if its step is shorter.

    Raises:
        ValueError: there is nothing to report, or no time to build it.
    """
    resolved = choose(spec)
    if resolved.traits.searches:
        # There is no time for a search; a schedule that a search finds takes no longer than this
        # one.
        resolved = resolved.without_search
    placement = resolved.place(traced.schedule.placement.ranks)
    costs = traced.costs(placement.stages)
    if costs is None:
        stages = traced.schedule.placement.stages
        raise ValueError(
            f"the schedule has {placement.stages} stages, whose costs cannot be computed from the "
            f"{stages} measured stages"
        )
    problem = Problem(placement, traced.microbatches, costs)
    if (_FITTED if entry.traits.uses_costs else _BUILT) * seconds_to_build(problem) > left:
        raise ValueError("the time for comparisons ended before this schedule was simulated")
    program = build_program(resolved, problem)
    if program.schedule.compute_rows == traced.schedule.rows:
        return
    free = _prospect(spec, program, traced, stock)
    if fits(free.peak, stock.peak):
        yield free
        return
    limited = Problem(placement, traced.microbatches, costs, MemoryLimit(microbatches=stock.peak))
    try:
        within = _prospect(spec, build_program(resolved, limited), traced, stock)
    except ValueError:  # the schedule does not fit into Megatron's memory
        within = None
    if within is not None:
        yield within
    if free.step < (1 - _WORTH) * (stock if within is None else within).step:
        yield free
    elif within is None:
        raise ValueError(
            "the schedule needs more memory than Megatron's own schedule, and is no faster"
        )


def _prospect(name: str, program: Program, traced: TracedCosts, stock: Prospect | None) -> Prospect:
    placement = program.schedule.placement
    ends = [traced.costs(placement.stages, share) for share in SHARES]
    ends += [doubted.costs(placement.stages) for doubted in traced.doubted()]
    timeline = simulate(program, program.problem.costs)
    steps = [simulate(program, end).makespan for end in ends if end is not None]
    low, high = min(timeline.makespan, *steps), max(timeline.makespan, *steps)
    stock_step = timeline.makespan if stock is None else stock.step
    return Prospect(
        schedule=name,
        vpp=placement.chunks,
        step=timeline.makespan,
        low=low,
        high=high,
        of_stock=(low / stock_step, high / stock_step),
        bubble_share=timeline.bubble_share_makespan,
        peak=max(peaks(program.schedule, in_microbatches(program.schedule))),
    )
