"""Tests of a step that is composed from ranks that ran alone."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from megatron_ext.compile.build import build_program, prove_built
from megatron_ext.compile.program.graph import channel_of
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.rehearsal.classes import RankClass, classes_of
from megatron_ext.rehearsal.compose import compose
from megatron_ext.rehearsal.record import RankRecord, RehearsedPass, RehearsedStep
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.costs import Costs, uniform
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.problem import Problem, Recompute, ScheduleOptions
from megatron_ext.schedule.schedule import is_compute
from megatron_ext.schedule.stock_executor import STOCK_EXECUTOR

BETWEEN = 0.25  # seconds of a rank between two passes
OUTSIDE = 7.0


def program_of(spec: str, ranks: int = 4, microbatches: int = 8, comm: float = 1.0) -> Program:
    resolved = choose(spec)
    placement = resolved.place(ranks)
    costs = uniform(placement, 40.0, 50.0, 30.0, comm)
    return build_program(resolved, Problem(placement, microbatches, costs))


def stages_of(program: Program) -> list[str]:
    """Return a description of each stage; only the first and the last one differ from the
    others."""
    last = program.schedule.placement.last
    return ["first", *["middle"] * (last - 1), "last"]


def classes(program: Program) -> tuple[RankClass, ...]:
    ranks = program.schedule.placement.ranks
    return classes_of(program.schedule, stages_of(program), range(ranks, 0, -1))


def record_of(
    program: Program, rank: int, seconds: Callable[[Action], float], *, between: float = 0.0
) -> RankRecord:
    """Return the record of ``rank``, which runs its passes one after the other."""
    now, passes = 100.0, []
    for action in program.schedule.rows[rank]:
        if is_compute(action):
            passes.append(RehearsedPass(action, now, now + seconds(action)))
            now = passes[-1].end + between
    whole = passes[-1].end - passes[0].start + OUTSIDE
    step = RehearsedStep(tuple(passes), whole)
    return RankRecord(rank, 4, rank, program.schedule.name, program.digest, 3, (step,) * 3)


def records_of(
    program: Program, seconds: Callable[[Action], float], *, between: float = 0.0
) -> Mapping[int, RankRecord]:
    return {
        one.rank: record_of(program, one.rank, seconds, between=between) for one in classes(program)
    }


def by_microbatch(program: Program) -> Costs:
    """Return costs whose passes differ by the class of their stage, and by up to 10 % by
    microbatch; messages take no time."""
    draws = random.Random(1)
    of_class = {"first": 0.9, "middle": 1.0, "last": 1.25}
    stages = [of_class[one] for one in stages_of(program)]
    factors = tuple(draws.uniform(0.9, 1.1) for _ in range(program.problem.microbatches))
    costs = program.problem.costs.without_messages()
    seconds = {
        kind: tuple(one * factor for one, factor in zip(figures, stages, strict=True))
        for kind, figures in costs.seconds.items()
    }
    at_places = dict.fromkeys(seconds, factors)
    return replace(costs.with_passes(seconds=seconds), at_places=at_places)


@pytest.mark.parametrize("spec", ["1f1b", "zb-h1", "zb-v", "v-half", "interleaved-zb", "gis"])
def test_the_step_is_as_long_as_if_each_rank_had_been_measured(spec: str) -> None:
    program = program_of(spec)
    costs = by_microbatch(program)
    step = compose(program, classes(program), records_of(program, costs.of))
    assert step.timeline.makespan == pytest.approx(simulate(program, costs).makespan)
    assert step.outside == pytest.approx(OUTSIDE)
    assert step.seconds == pytest.approx(step.timeline.makespan + OUTSIDE)


def test_messages_are_in_no_measured_figure() -> None:
    """The step that a rehearsal composes of measured passes contains no seconds of messages. They
    are only estimated, so a slow link does not change the composed step."""
    near, far = (program_of("zb-h1", comm=comm) for comm in (0.0, 20.0))
    made = [
        compose(program, classes(program), records_of(program, near.problem.costs.of))
        for program in (near, far)
    ]
    assert simulate(far, far.problem.costs).makespan > simulate(near, near.problem.costs).makespan
    assert made[1].timeline.makespan == pytest.approx(made[0].timeline.makespan, rel=0.05)


@pytest.mark.parametrize("spec", ["1f1b", "zb-v", "interleaved-zb"])
def test_messages_have_the_times_of_the_composed_step(spec: str) -> None:
    """Messages have the times of the composed step. For each channel, a rank lists these times in
    the order of its own actions."""
    program = program_of(spec, comm=0.0)
    costs = by_microbatch(program)
    step = compose(program, classes(program), records_of(program, costs.of))
    expected: dict[tuple[int, str], list[float]] = defaultdict(list)
    for event in simulate(program, costs).events:
        if RULES[event.action.kind].is_message:
            name = str(channel_of(event.action, program.schedule.placement))
            expected[event.rank, name].append(event.end)
    assert sum(map(len, step.moved)) == len(expected) > 0
    for (rank, name), ends in expected.items():
        assert step.moved[rank][name] == pytest.approx(ends)


def test_a_replay_has_the_seconds_of_its_passes_and_none_of_its_waits() -> None:
    program = program_of("1f1b")
    of = program.problem.costs.of
    alone = records_of(program, of, between=BETWEEN)
    waits = records_of(program, lambda action: 1.25 * of(action), between=100 * BETWEEN)
    step = compose(program, classes(program), alone, waits)
    slow = records_of(program, lambda action: 1.25 * of(action), between=BETWEEN)
    expected = compose(program, classes(program), slow)
    assert step.timeline.makespan == pytest.approx(expected.timeline.makespan)


def test_the_wait_before_a_replays_first_pass_is_no_time_outside_of_passes() -> None:
    """The wait before the first pass of a replay is not counted as time outside of passes.

    A replayed step of a late rank begins with the wait for its first message. A composed step used
    to count it as time of the optimizer.
    """
    program = program_of("1f1b")
    alone = records_of(program, program.problem.costs.of)
    late = {
        rank: replace(
            record,
            steps=tuple(replace(step, seconds=step.seconds + 100 * rank) for step in record.steps),
        )
        for rank, record in alone.items()
    }
    step = compose(program, classes(program), alone, late)
    assert step.outside == pytest.approx(OUTSIDE)


def test_time_between_passes_holds_up_a_rank_and_is_no_pass() -> None:
    program = program_of("1f1b")
    of = program.problem.costs.of
    step = compose(program, classes(program), records_of(program, of, between=BETWEEN))
    row = step.timeline.compute[0]
    assert all(event.end - event.start == pytest.approx(of(event.action)) for event in row)
    tight = compose(program, classes(program), records_of(program, of)).timeline.makespan
    number = len(row)
    assert tight + (number - 1) * BETWEEN <= step.timeline.makespan < tight + 2 * number * BETWEEN


def test_ranks_that_recompute_are_a_class_of_their_own() -> None:
    """Ranks with recompute are not in the same class as ranks without it (one rank of a class is
    rehearsed for all). Rank 1 has the pass R and rank 2 does not, although their stages are
    equal."""
    resolved = choose("zb-h1")
    placement = resolved.place(4)
    options = ScheduleOptions(recompute=Recompute(first=2))
    problem = Problem(placement, 8, uniform(placement, 40.0, 50.0, 30.0), options=options)
    program = build_program(resolved, problem)
    assert sorted(one.members for one in classes(program)) == [(0,), (1,), (2,), (3,)]
    of = program.problem.costs.of
    step = compose(program, classes(program), records_of(program, of))
    whole = simulate(program, program.problem.costs).makespan
    assert step.timeline.makespan == pytest.approx(whole)


def test_a_rank_that_ran_another_order_is_no_part_of_the_step() -> None:
    program = program_of("1f1b")
    records = dict(records_of(program, program.problem.costs.of))
    first, second, *others = records[3].steps[0].passes
    swapped = replace(records[3].steps[0], passes=(second, first, *others))
    records[3] = replace(records[3], steps=(records[3].steps[0], swapped))
    with pytest.raises(
        ValueError, match="rank 3, timed step 2: pass 1 of the rehearsed rank was 3B0"
    ):
        compose(program, classes(program), records)


@pytest.mark.parametrize(
    ("spec", "ranks", "number"),
    [("1f1b", 16, 3), ("zb-h1", 16, 3), ("zb-v", 16, 2), ("1f1b", 2, 2), ("v-half", 8, 2)],
)
def test_ranks_with_equal_stages_run_once(spec: str, ranks: int, number: int) -> None:
    program = program_of(spec, ranks, 2 * ranks)
    made = classes(program)
    assert len(made) == number
    assert sorted(rank for one in made for rank in one.members) == list(range(ranks))


def test_the_fullest_rank_of_a_class_runs() -> None:
    program = program_of("1f1b", ranks=5)
    made = classes_of(program.schedule, stages_of(program), [9, 1, 3, 2, 9])
    assert [one.rank for one in made] == [2, 0, 4]  # ranks that send in both directions come first
    assert [one.sends_both for one in made] == [True, False, False]


def test_megatrons_own_ranks_wait_as_megatron_does() -> None:
    """In a composed step of Megatron's own schedule, ranks wait as Megatron does. The step used to
    be composed as if this project's executor ran it."""
    ours = program_of("interleaved:vpp=2", microbatches=16, comm=0.0)
    problem = replace(ours.problem, stock=STOCK_EXECUTOR)
    stock = prove_built(ours.schedule, problem)
    costs = by_microbatch(ours)
    expected = simulate(stock, costs).makespan
    composed = compose(stock, classes(stock), records_of(stock, costs.of))
    assert composed.timeline.makespan == pytest.approx(expected)
    assert expected > 1.005 * simulate(ours, costs).makespan
