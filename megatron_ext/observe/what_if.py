"""What schedules of ours would take with costs that a step of Megatron's own has shown.

Its backward pass is whole: how much of it W would take is estimated, and since nobody has seen it,
each answer is a range over a W of 0.3 to 0.5 of B.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.compile.build import build_program, complete
from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import FamilyEntry, Mark, choose, entries
from megatron_ext.compile.size import seconds_to_build
from megatron_ext.progress import task
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, LinkCosts, PassCosts
from megatron_ext.schedule.limit import MemoryLimit, fits
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule

SHARES = (0.3, 0.5)  # of B that is W, at the least and at the most
SECONDS = 60.0
_WORTH = 0.001  # of the time: what less memory is given away for
# What families may take beside `seconds_to_build`, with a limit and without, measured on 8 ranks.
_BUILT, _FITTED = 2, 12


def weight_shares(costs: Costs) -> tuple[float, ...]:
    """Which part of each stage's backward pass is W, as ``costs`` say."""
    pairs = zip(
        costs.seconds[Kind.BACKWARD_INPUT], costs.seconds[Kind.BACKWARD_WEIGHT], strict=True
    )
    return tuple(w / (i + w) if i + w else 0.5 for i, w in pairs)


@dataclass(frozen=True)
class SeenCosts:
    """What a step has shown, in seconds per stage.

    Attributes:
        schedule: of which it was, with its passes alone; B are whole.
        weight_shares: which part of B is estimated to be W.
        hop: of a message.
    """

    schedule: Schedule
    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight_shares: tuple[float, ...]
    hop: float

    def costs(self, stages: int, share: float | None = None) -> Costs | None:
        """Costs with the model cut into so many ``stages``: each of these in equal parts, or as
        many as it takes together. None if they cannot be cut so.

        ``share``: of B that is W; None: as estimated.
        """
        shares = self.weight_shares if share is None else (share,) * len(self.backward)
        weight = [whole * part for whole, part in zip(self.backward, shares, strict=True)]
        inputs = [whole - part for whole, part in zip(self.backward, weight, strict=True)]
        if stages % len(weight) and len(weight) % stages:
            return None
        seconds = {
            kind: _cut(figures, stages)
            for kind, figures in (
                (Kind.FORWARD, self.forward),
                (Kind.BACKWARD_INPUT, inputs),
                (Kind.BACKWARD_WEIGHT, weight),
            )
        }
        return Costs(
            PassCosts(seconds), LinkCosts(self.hop), origin="measured of Megatron's own step"
        )


def _cut(figures: Sequence[float], stages: int) -> tuple[float, ...]:
    if stages >= len(figures):
        parts = stages // len(figures)
        return tuple(figure / parts for figure in figures for _ in range(parts))
    joined = len(figures) // stages
    return tuple(sum(figures[at : at + joined]) for at in range(0, len(figures), joined))


@dataclass(frozen=True)
class Prospect:
    """What a schedule would take; ``--json`` prints these names in this order.

    Attributes:
        vpp: chunks of a rank.
        step: seconds, with the estimated W.
        low, high: the least and the most of it, with that W and at both ends of its range.
        of_stock: ``low`` and ``high``, as parts of what Megatron's own would take.
        bubble_share: of the makespan, with the estimated W.
        peak: microbatches of the rank that holds most.
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
    """Megatron's own schedule and ours, all simulated with the costs that were seen.

    Attributes:
        within: those that hold no more than Megatron's own, shortest first.
        with_more: those that gain by holding more, likewise.
        left_out: why others are in neither.
    """

    stock: Prospect
    within: tuple[Prospect, ...]
    with_more: tuple[Prospect, ...]
    left_out: Mapping[str, str]


def what_if(seen: SeenCosts, seconds: float = SECONDS) -> WhatIf:
    """What each of our schedules would take where ``seen`` was measured.

    Those that hold stages otherwise count too (a V has two a rank): the launch would need other
    virtual stages for them. What would take longer than ``seconds`` to tell, all together, is left
    out.
    """
    start = time.perf_counter()
    placement = seen.schedule.placement
    own = seen.costs(placement.stages)
    assert own is not None
    passes = seen.schedule
    problem = Problem(placement, seen.microbatches, own)
    program = complete(passes, problem)
    stock = _prospect(passes.name, program, seen, None)
    within: list[Prospect] = []
    with_more: list[Prospect] = []
    left_out: dict[str, str] = {}
    specs = list(_specs(placement))
    with task("comparing schedules with Megatron's own", len(specs)) as work:
        for entry, spec in specs:
            left = seconds - (time.perf_counter() - start)
            try:
                tried = list(_tried(entry, spec, seen, stock, left))
            except ValueError as error:
                left_out[spec] = str(error)
                tried = []
            for prospect in tried:
                (within if fits(prospect.peak, stock.peak) else with_more).append(prospect)
            work.done += 1
    return WhatIf(stock, _shortest_first(within), _shortest_first(with_more), left_out)


def _shortest_first(prospects: Sequence[Prospect]) -> tuple[Prospect, ...]:
    return tuple(sorted(prospects, key=lambda prospect: (prospect.step, prospect.peak)))


def _specs(placement: Placement) -> Iterator[tuple[FamilyEntry, str]]:
    """What a launch could ask for in place of its ``placement``; what searches comes last."""
    for entry in sorted(entries().values(), key=lambda entry: entry.traits.searches):
        has_chunks = "vpp" in inspect.signature(entry.place).parameters
        if entry.mark is Mark.LABORATORY or (has_chunks and placement.chunks == 1):
            continue
        yield entry, f"{entry.name}:vpp={placement.chunks}" if has_chunks else entry.name


def _tried(
    entry: FamilyEntry, spec: str, seen: SeenCosts, stock: Prospect, left: float
) -> Iterator[Prospect]:
    """The schedule without a memory limit, and where that holds more than ``stock``, within what
    that holds. Raises ValueError where there is nothing to tell, or no time to."""
    choice = choose(spec)
    if choice.traits.searches:
        choice = choice.without_search  # nobody waits for it: what it would find takes no more
    placement = choice.place(seen.schedule.placement.ranks)
    costs = seen.costs(placement.stages)
    if costs is None:
        stages = seen.schedule.placement.stages
        raise ValueError(f"it has {placement.stages} stages, and {stages} cannot be cut so")
    problem = Problem(placement, seen.microbatches, costs)
    if (_FITTED if entry.traits.uses_costs else _BUILT) * seconds_to_build(problem) > left:
        raise ValueError("there was no time left for it")
    program = build_program(choice, problem)
    if program.schedule.compute_rows == seen.schedule.rows:
        return
    free = _prospect(spec, program, seen, stock)
    if fits(free.peak, stock.peak):
        yield free
        return
    limited = Problem(placement, seen.microbatches, costs, MemoryLimit(microbatches=stock.peak))
    try:
        within = _prospect(spec, build_program(choice, limited), seen, stock)
    except ValueError:  # it needs more
        within = None
    if within is not None:
        yield within
    if free.step < (1 - _WORTH) * (stock if within is None else within).step:
        yield free
    elif within is None:
        raise ValueError("it holds more, and gains nothing by it")


def _prospect(name: str, program: Program, seen: SeenCosts, stock: Prospect | None) -> Prospect:
    placement = program.schedule.placement
    ends = [seen.costs(placement.stages, share) for share in SHARES]
    timeline = simulate(program, program.problem.costs)
    steps = [simulate(program, end).makespan for end in ends if end is not None]
    low, high = min(timeline.makespan, *steps), max(timeline.makespan, *steps)
    whole = timeline.makespan if stock is None else stock.step
    return Prospect(
        schedule=name,
        vpp=placement.chunks,
        step=timeline.makespan,
        low=low,
        high=high,
        of_stock=(low / whole, high / whole),
        bubble_share=timeline.bubble_share_makespan,
        peak=max(peaks(program.schedule, in_microbatches(program.schedule))),
    )
