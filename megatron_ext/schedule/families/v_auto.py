"""The best V schedule that can be found for given costs and a given memory limit.

Nothing is prescribed: a search (`v_search`) packs many plans from both sides (`double_justify`) and
goes on from the best. Every other family on the V is among the plans it starts from, and among the
schedules it chooses from in the end by what a step of them costs, simulated. Where one of them
costs no more than any schedule must (`lower_bound`), there is nothing to search for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.build.build import complete
from megatron_ext.schedule.build.registry import Mark, entries, family
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit, with_rounding
from megatron_ext.schedule.placement import v
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.program.memory import bytes_for
from megatron_ext.schedule.program.simulate import simulate, step_seconds
from megatron_ext.schedule.program.verify import Program
from megatron_ext.schedule.schedule import Schedule, bitwise_order
from megatron_ext.schedule.schedule_csv import from_csv, to_csv
from megatron_ext.schedule.search import disk_cache
from megatron_ext.schedule.search.bounds import lower_bound
from megatron_ext.schedule.search.double_justification import rows_of
from megatron_ext.schedule.search.v_search import plan_of, search, shop_of

NAME = "v-auto"


def v_at_once(problem: Problem) -> Schedule:
    """The best of the other families on the V that keeps to `v_auto`'s limit. Raises as that."""
    problem = _limited(problem)
    _memory(problem)
    programs = _programs_without_search(problem)
    best = min(programs, key=lambda program: step_seconds(program, problem.costs))
    return _without_messages(best)


@family(
    NAME,
    v,
    source="ours; the V is that of Qi et al. 2024, arXiv:2405.15362",
    mark=Mark.STABLE,
    splits_backward=True,
    uses_costs=True,
    searches=True,
    steps_overlap=True,
    at_once=v_at_once,
)
def v_auto(problem: Problem) -> Schedule:
    """Least makespan within the memory limit (without one: p microbatches, as ZB-V needs); with
    post-validation, least span.

    Raises:
        ValueError: no V schedule fits into the limit.
    """
    problem = _limited(problem)
    amounts, allowed = _memory(problem)
    inputs = repr(problem)  # all that the schedule depends on
    cached = disk_cache.load(NAME, inputs)
    if cached is not None:
        program = _from_text(cached, problem)
        if program is not None:
            return _without_messages(program)
    best = _best(problem, amounts, allowed)
    disk_cache.store(NAME, inputs, to_csv(best))
    return best


def _limited(problem: Problem) -> Problem:
    """With a memory limit. An evaluation runs the forwards of the training schedule, so it is the
    same."""
    limit = problem.memory_limit or MemoryLimit(microbatches=problem.ranks)
    return replace(problem, memory_limit=limit, forward_only=False)


def _best(problem: Problem, amounts: dict[Held, tuple[float, ...]], allowed: float) -> Schedule:
    costs = problem.costs
    known = list(_programs_without_search(problem))
    seconds = [step_seconds(program, costs) for program in known]
    least = lower_bound(problem, splits_backward=True) * (1 + 1e-9)
    if min(seconds) > least:
        shop, work = shop_of(problem, amounts, allowed)
        plans = [plan_of(simulate(program, costs), work) for program in known]
        for starts in search(shop, plans, least / work + max(shop.tails)):
            program = _proved(Schedule(NAME, problem.placement, rows_of(starts)), problem)
            if program is not None:
                known.append(program)
                seconds.append(step_seconds(program, costs))
    return _without_messages(known[seconds.index(min(seconds))])


def _without_messages(program: Program) -> Schedule:
    return replace(program.schedule, name=NAME, rows=program.schedule.compute_rows)


def _programs_without_search(problem: Problem) -> Iterator[Program]:
    """What is in order and within the limit without a search."""
    for entry in entries().values():
        if entry.name == NAME or entry.place(problem.ranks).rank_of != problem.placement.rank_of:
            continue
        try:
            schedule = entry.build(problem)
        except ValueError:
            continue  # it has no schedule for this problem
        program = _proved(schedule, problem)
        if program is not None:
            yield program
    program = _proved(_one_at_a_time(problem), problem)
    assert program is not None
    yield program


def _proved(schedule: Schedule, problem: Problem) -> Program | None:
    """The program of ``schedule``; None if it is not sound or not within the limit."""
    try:
        program = complete(schedule, problem)
    except ValueError:
        return None
    return program if bitwise_order(schedule) else None


def _from_text(text: str, problem: Problem) -> Program | None:
    try:
        rows = from_csv(text, NAME).rows
    except ValueError:
        return None
    return _proved(Schedule(NAME, problem.placement, rows), problem)


def _one_at_a_time(problem: Problem) -> Schedule:
    """No schedule needs less memory."""
    p, m = problem.ranks, problem.microbatches
    rows = []
    for rank in range(p):
        outer, inner = p - 1 - rank, p + rank
        passes = (
            (outer, Kind.FORWARD),
            (inner, Kind.FORWARD),
            (inner, Kind.BACKWARD_INPUT),
            (inner, Kind.BACKWARD_WEIGHT),
            (outer, Kind.BACKWARD_INPUT),
            (outer, Kind.BACKWARD_WEIGHT),
        )
        rows.append(tuple(Action(stage, kind, k) for k in range(m) for stage, kind in passes))
    return Schedule(NAME, problem.placement, tuple(rows))


def _memory(problem: Problem) -> tuple[dict[Held, tuple[float, ...]], float]:
    """What each stage holds, and what a rank may hold, in one unit.

    Raises:
        ValueError: not even one microbatch at a time fits, or bytes are not known.
    """
    limit = problem.memory_limit
    assert limit is not None
    if limit.microbatches is not None:
        share = (1 / problem.placement.chunks,) * problem.placement.stages
        amounts = {Held.ACTIVATION: share, Held.WEIGHT_INPUTS: share}
        allowed = limit.microbatches
    else:
        assert limit.bytes is not None
        amounts, allowed = dict(bytes_for(limit, problem.costs)), limit.bytes
    activation, rest = amounts[Held.ACTIVATION], amounts[Held.WEIGHT_INPUTS]
    least = max(
        max(activation[outer] + max(activation[inner], rest[inner]), rest[outer])
        for outer, inner in problem.placement.stages_of
    )
    allowed = with_rounding(allowed)
    if allowed < least:
        raise ValueError(
            f"v-auto: the memory limit of {limit} does not hold even one microbatch; "
            f"the least feasible limit is {limit.at_least(least)}"
        )
    return amounts, allowed
