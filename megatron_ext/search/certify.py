"""Distance of a schedule from the best possible one: analytic bounds, then CP-SAT.

The model is the simulator's, without the order of messages on a channel (which can only make the
bound lower). Passes of a rank do not overlap, the needs of a pass have ended a message earlier, and
a rank holds no more than the limit between F and W. Microbatch order costs nothing (`bounds`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ext.base.progress import task
from megatron_ext.compile.program.graph import needed
from megatron_ext.compile.program.pass_graph import senders
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.problem import Offload, VocabularyParallel
from megatron_ext.search.bounds import lower_bound
from megatron_ext.search.ticks import common_tick
from megatron_ext.search.v_patterns import excluded_period

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Certificate:
    """Bounds that show how far a schedule's makespan is from the best possible.

    ``lower_bound`` holds for every schedule of the placement within the memory limit; if the
    schedule's backward pass is not split, for those whose backward pass is not split either.
    ``excluded_period`` is no such bound. It says that no steady state that repeats one microbatch's
    passes has this period or a shorter one; None if that is not known.
    """

    makespan: float
    lower_bound: float
    excluded_period: float | None = None

    @property
    def gap(self) -> float:
        """Difference between the makespan and its lower bound, as a share of the makespan."""
        return max(0.0, 1 - self.lower_bound / self.makespan)

    @property
    def optimal(self) -> bool:
        """Whether no schedule on this placement within the memory limit can be shorter."""
        return self.lower_bound >= self.makespan * (1 - _TOLERANCE)


def certify(program: Program, seconds: float) -> Certificate:
    """Return lower bounds of the makespan of ``program``, analytic ones first.

    If these leave a gap, CP-SAT searches for about ``seconds``, and the search for periods of a
    steady state takes about as long.

    Raises:
        ValueError: the program is vocabulary parallel, offloads or recomputes, or has slices; or
            OR-tools is needed and not installed.
    """
    problem = program.problem
    options = problem.options
    if options.vocab_parallel is not VocabularyParallel.NONE:
        raise ValueError(
            "--certify has no lower bound for schedules with vocabulary parallelism "
            f"{options.vocab_parallel}: drop --certify or --vocab-parallel"
        )
    if options.activation_offload is not Offload.NONE:
        raise ValueError(
            "--certify has no lower bound for schedules with offload "
            f"{options.activation_offload}: drop --certify or --activation-offload"
        )
    if problem.slices.count > 1:
        raise ValueError(
            "--certify has no lower bound for schedules with slices of sequences: drop --certify "
            "or --slices"
        )
    kinds = {kind for _, kind in program.schedule.arrays.stage_kinds}
    if any(RULES[kind].repeats for kind in kinds):
        raise ValueError(
            "--certify has no lower bound for schedules with recompute: drop --certify or "
            "--recompute"
        )
    splits = any(
        RULES[a.kind].covers == (Kind.BACKWARD_WEIGHT,)
        for row in program.schedule.rows
        for a in row
    )
    makespan = simulate(program, problem.costs).makespan
    certificate = Certificate(makespan, lower_bound(problem, splits))
    if certificate.optimal:
        return certificate
    bound = max(certificate.lower_bound, _search(program, makespan, seconds))
    with task("looking for steady states", seconds=seconds):
        return Certificate(makespan, bound, excluded_period(problem, seconds) if splits else None)


def _search(program: Program, makespan: float, seconds: float) -> float:
    """Return CP-SAT's lower bound of the makespan, in the unit of the costs.

    No duration is rounded up, so the bound holds.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ValueError(
            "--certify needs OR-tools, which is not installed: pip install 'megatron_ext[certify]'"
        ) from None
    costs = program.problem.costs
    tick = common_tick((costs.of(a) for a in program.graph.actions), makespan)
    horizon = round(makespan / tick)
    model: Any = cp_model.CpModel()
    starts: dict[Action, Any] = {}
    ends: dict[Action, Any] = {}
    timeline = simulate(program, costs)
    for rank, row in enumerate(program.schedule.compute_rows):
        intervals = []
        for action, event in zip(row, timeline.compute[rank], strict=True):
            is_w = action.kind is Kind.BACKWARD_WEIGHT
            least = costs.of(action) - (
                costs.fused_backward_saving_on(action.stage) if is_w else 0.0
            )
            ticks = _ticks(least, tick)
            starts[action] = model.new_int_var(0, horizon, "")
            ends[action] = starts[action] + ticks
            intervals.append(model.new_fixed_size_interval_var(starts[action], ticks, ""))
            model.add_hint(starts[action], _ticks(event.start, tick))
        model.add_no_overlap(intervals)
    for action in starts:
        for needed_action, p2p_seconds in _producers(action, program, starts):
            model.add(starts[action] >= ends[needed_action] + _ticks(p2p_seconds, tick))
        following = action._replace(microbatch=action.microbatch + 1)
        if following in starts:
            model.add(starts[following] >= ends[action])
    _add_memory_limit(model, program, starts, ends, horizon)
    end = model.new_int_var(0, horizon, "makespan")
    for action in ends:
        model.add(ends[action] <= end)
    model.minimize(end)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    with task("searching for a shorter schedule", seconds=seconds):
        solver.solve(model)
    return float(solver.best_objective_bound) * tick


def _producers(
    action: Action, program: Program, passes: Container[Action]
) -> Iterator[tuple[Action, float]]:
    """Yield the passes whose results ``action`` uses, each with the seconds of the message
    between."""
    placement, costs = program.schedule.placement, program.problem.costs
    for _, choices in needed(action, placement):
        yield from ((needed_action, 0.0) for needed_action in choices if needed_action in passes)
    for sender, send in senders(action, placement):
        if sender in passes:
            yield sender, costs.of(send)


def _ticks(figure: float, tick: float) -> int:
    """Return the duration ``figure`` in ticks: rounded down, but not by mere rounding errors."""
    return int(figure / tick + 1e-6)


def _add_memory_limit(model: Any, program: Program, starts: Any, ends: Any, horizon: int) -> None:
    """Add the memory limit of the problem to the CP-SAT ``model``.

    A chunk counts 1/v of a microbatch from the start of its F to the end of its W or B.
    """
    limit = program.problem.memory_limit
    if limit is None or limit.microbatches is None:
        return
    placement = program.schedule.placement
    for row in program.schedule.compute_rows:
        first = [a for a in row if Kind.FORWARD in RULES[a.kind].covers]
        last = {
            (a.stage, a.microbatch): a for a in row if Kind.BACKWARD_WEIGHT in RULES[a.kind].covers
        }
        held = [
            model.new_interval_var(
                starts[f],
                model.new_int_var(0, horizon, ""),
                ends[last[f.stage, f.microbatch]],
                "",
            )
            for f in first
        ]
        model.add_cumulative(held, [1] * len(held), int(limit.microbatches * placement.chunks))
