"""Tests of schedules with a vocabulary that is split over the ranks: order, memory and time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import Amount, in_bytes, in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate, simulate_unproved
from megatron_ext.compile.program.verify import InvalidSchedule, Program, prove
from megatron_ext.compile.registry import choose
from megatron_ext.compile.transforms.vocabulary_costs import share_vocabulary
from megatron_ext.features.vocabulary.schedule.vocabulary import divide_vocabulary
from megatron_ext.schedule.action import Kind, parse_action
from megatron_ext.schedule.costs import Costs, LinkCosts, PassCosts, VocabularyCosts, uniform
from megatron_ext.schedule.kinds import RULES, Held, Lane, Where
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import P2P, Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule
from tests.helpers.combinations import IS_NIGHT
from tests.helpers.random_schedules import PROPERTY, mutate, random_case, seeds
from tests.helpers.reference_runs import run, runs_to_end
from tests.helpers.schedules import with_messages

NONE, ONE, TWO = VocabularyParallel
MORE = {ONE: 2, TWO: 1}  # additional intervals, which are as many additional microbatches in memory
LINES, VS = ("1f1b", "zb-h1", "gpipe", "zb-h2"), ("zb-v", "v-half", "v-min", "1f1b-v")
LAYERS_HOLD = (Held.ACTIVATION, Held.WEIGHT_INPUTS)
PASSES = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def random_vocabulary_costs(random: Random, placement: Placement) -> Costs:
    """Return costs drawn at random: layers are equal, unequal or mostly free, and the output layer
    takes as long as up to twenty stages."""
    choices = random.choice([(6.0,), (0.5, 1.0, 1.7, 3.1), (0.0, 0.0, 1.0)])
    figures = {d: tuple(random.choice(choices) for _ in range(placement.stages)) for d in PASSES}
    figures[Kind.FORWARD] = (1.0, *figures[Kind.FORWARD][1:])
    layers = Costs(
        PassCosts(figures, held_bytes=dict.fromkeys(LAYERS_HOLD, (1e9,) * placement.stages)),
        LinkCosts(random.choice([0.0, 0.3, 5.0])),
    )
    head = random.choice([0.0, 1.0, 20.0]), random.choice([0.0, 20.0]), random.choice([0.0, 7.0])
    return layers.with_vocabulary(
        VocabularyCosts(head, random.choice([(0.0, 0.0), (1.0, 2.0)]), 4e9)
    )


def random_problem(random: Random, names: Sequence[str], most: int) -> tuple[str, Problem]:
    name, ranks = random.choice(names), random.randint(2, most)
    placement = choose(name).place(ranks)
    microbatches = random.choice([1, 2, 3, ranks, 2 * ranks + random.randint(0, 2)])
    costs = random_vocabulary_costs(random, placement)
    return name, Problem(
        placement,
        microbatches,
        costs,
        options=ScheduleOptions(vocab_parallel=random.choice([ONE, TWO])),
    )


def without(name: str, problem: Problem) -> Schedule:
    """Return the schedule before the passes of the vocabulary are added."""
    costs = share_vocabulary(problem.costs, problem.placement, problem.options.vocab_parallel)
    return choose(name).build(replace(problem, costs=costs).with_options(vocab_parallel=NONE))


def check(program: Program) -> None:
    """Assert that each pass is there once, and that ranks that run in order reach the end at the
    simulated times."""
    schedule, problem = program.schedule, program.problem
    other = run(schedule, problem)
    assert other.ended_well, other
    for event in simulate(program, problem.costs).events:
        assert other.times[event.action][1] == pytest.approx(event.end), event
    wanted = {Kind.LOGITS, Kind.EMBEDDING}
    if not problem.forward_only:
        wanted |= {Kind.LOGITS_INPUT, Kind.LOGITS_WEIGHT, Kind.EMBEDDING_WEIGHT}
    for rank, row in enumerate(schedule.rows):
        shards = Counter(a.kind for a in row if RULES[a.kind].where is not Where.STAGE)
        passes = {kind: n for kind, n in shards.items() if RULES[kind].lane is Lane.COMPUTE}
        here = wanted | ({Kind.LOSS} if rank == schedule.placement.rank_of[-1] else set())
        assert passes == dict.fromkeys(here, problem.microbatches)


@settings(PROPERTY, max_examples=30)
@given(seeds)
def test_any_line_or_v_takes_them_and_holds_one_or_two_more(seed: int) -> None:
    """The passes of the vocabulary can be added to any linear or V schedule, and make it hold one
    or two microbatches more.

    Passes of the vocabulary used to be inserted by their start times in a simulation. A rank that
    waits for others then held up to one microbatch more. A pass that takes no time, or a message
    that takes longer than the passes of a microbatch, came before something that it needs.
    """
    name, problem = random_problem(Random(seed), LINES + VS, 9)
    program = build_program(choose(name), problem)
    check(program)
    for row in program.schedule.compute_rows:
        for stage, kind in {(action.stage, action.kind) for action in row}:
            order = [a.microbatch for a in row if (a.stage, a.kind) == (stage, kind)]
            assert order == sorted(order), "gradients are added in another order than stock's"
    alone, more = without(name, problem), MORE[problem.options.vocab_parallel]
    amount = in_microbatches(alone)
    before, after = peaks(alone, amount), peaks(program.schedule, amount)
    assert max(after) == min(max(before) + more, problem.microbatches)
    assert all(a <= b + more for a, b in zip(after, before, strict=True))
    check(build_program(choose(name), replace(problem, forward_only=True)))


@settings(PROPERTY, max_examples=35)
@given(seeds)
def test_any_schedule_takes_them(seed: int) -> None:
    """The passes of the vocabulary can be added to any schedule: with microbatches that overtake
    one another, with any placement, and with B as well as I and W."""
    random = Random(seed)
    case = random_case(seed)
    problem = case.problem.with_options(p2p=P2P.ASYNC, vocab_parallel=random.choice([ONE, TWO]))
    whole = problem.costs.with_vocabulary(VocabularyCosts((1.0, 2.0, 3.0), (1.0, 1.0)))
    shared = share_vocabulary(whole, problem.placement, problem.options.vocab_parallel)
    problem = replace(problem, costs=shared)
    schedule = divide_vocabulary(case.schedule, problem)
    check(prove(with_messages(schedule, problem), problem))
    amount = in_microbatches(schedule)
    for before, after in zip(peaks(case.schedule, amount), peaks(schedule, amount), strict=True):
        assert (
            after <= before + MORE[problem.options.vocab_parallel] + 1e-9
        )  # memory is counted in microbatches


@settings(PROPERTY, max_examples=60)
@given(seeds)
def test_the_proof_and_the_ranks_agree(seed: int) -> None:
    """The proof refuses a damaged schedule if and only if the schedule does not run to its end."""
    random = Random(seed)
    name, problem = random_problem(random, ("zb-h1", "1f1b", "zb-v"), 3)
    problem = replace(problem, microbatches=min(problem.microbatches, 3))
    program = build_program(choose(name), problem)
    for damages in (1, 1, 2, 2):
        damaged = program.schedule
        for _ in range(damages):
            damaged = mutate(damaged, random)
        try:
            prove(damaged, program.problem)
            proved = True
        except InvalidSchedule:
            proved = False
        assert proved == run(damaged, program.problem, held_up=True).ended_well


def first_of(name: str, how: VocabularyParallel) -> tuple[Schedule, Problem]:
    placement = choose(name).place(2)
    costs = uniform(placement, 1, 1, 1).with_vocabulary(VocabularyCosts((1.0, 1.0, 1.0)))
    program = build_program(
        choose(name), Problem(placement, 2, costs, options=ScheduleOptions(vocab_parallel=how))
    )
    return program.schedule, program.problem


def moved(schedule: Schedule, rank: int, texts: Sequence[str], before: str | None) -> Schedule:
    """Return ``schedule`` with the given actions of ``rank`` moved before another action, or to the
    end."""
    actions = list(map(parse_action, texts))
    row = [action for action in schedule.rows[rank] if action not in actions]
    at = len(row) if before is None else row.index(parse_action(before))
    row[at:at] = actions
    rows = (*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :])
    return replace(schedule, rows=rows)


def test_collectives_in_another_order_on_one_rank_are_refused() -> None:
    schedule, problem = first_of("zb-h1", TWO)
    crossed = moved(schedule, 0, ["0BCAST_S1"], before="0BCAST_S0")
    with pytest.raises(InvalidSchedule) as refusal:
        prove(crossed, problem)
    assert "collectives cross: 0BCAST_S1 of rank 0 would meet 1BCAST_S0 of rank 1" in str(
        refusal.value
    )
    assert not runs_to_end(crossed, problem)


def test_ranks_that_wait_for_one_another_in_a_collective_are_refused() -> None:
    """A collective in which ranks wait for one another is refused. Rank 1 needs the sum before its
    I, and rank 0 needs this I before it adds its part to the sum."""
    schedule, problem = first_of("zb-h1", ONE)
    assert runs_to_end(schedule, problem)
    rest = ["0SI0", "0REDUCE_SI0", "0WAIT_SI0", "0SW0", "0SI1", "0REDUCE_SI1", "0WAIT_SI1", "0SW1"]
    hanging = moved(schedule, 0, rest, before=None)
    with pytest.raises(InvalidSchedule) as refusal:
        prove(hanging, problem)
    assert "it would hang" in str(refusal.value) and "REDUCE_SI0" in str(refusal.value)
    assert not runs_to_end(hanging, problem)


# --- memory limits


@pytest.mark.search
@pytest.mark.parametrize("name", ["zb-auto", "v-auto"])
@pytest.mark.parametrize("how", [ONE, TWO])
def test_searches_leave_room(name: str, how: VocabularyParallel) -> None:
    placement = choose(name).place(3)
    costs = uniform(placement, 10, 12, 8, 1).with_vocabulary(VocabularyCosts((10.0, 12.0, 8.0)))
    limit = 2 + MORE[how]
    memory = MemoryLimit(microbatches=limit)
    problem = Problem(placement, 6, costs, memory, options=ScheduleOptions(vocab_parallel=how))
    program = build_program(choose(name), problem)
    check(program)
    held = max(peaks(program.schedule, in_microbatches(program.schedule)))
    assert limit - 1 < held <= limit


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "zb-auto"])
@pytest.mark.parametrize("how", [ONE, TWO])
def test_limits_in_bytes_count_the_shards_logits(name: str, how: VocabularyParallel) -> None:
    placement = choose(name).place(4)
    layers = uniform(placement, 3, 3, 3, 0.1).with_passes(
        held_bytes=dict.fromkeys(LAYERS_HOLD, (2**30,) * placement.stages)
    )
    costs = layers.with_vocabulary(VocabularyCosts((3.0, 3.0, 3.0), logits_bytes=4 * 2**30))

    def held(limit: MemoryLimit | None) -> float:
        program = build_program(
            choose(name),
            Problem(placement, 12, costs, limit, options=ScheduleOptions(vocab_parallel=how)),
        )
        amount: Amount = in_bytes(program.problem.costs)
        return max(peaks(program.schedule, amount))

    with pytest.raises(ValueError, match=r"vocabulary parallelism . adds"):
        held(MemoryLimit(bytes=2 * 2**30))
    more = MORE[how]
    generous = (4 + more) * placement.chunks * 2**30 + (more + 1) * 2**30
    assert held(MemoryLimit(bytes=generous)) <= generous
    logits = held(None) - max(
        peaks(
            build_program(
                choose(name),
                Problem(placement, 12, costs, options=ScheduleOptions(vocab_parallel=how)),
            ).schedule,
            lambda kind, stage: 0.0 if kind in (Held.LOGITS, Held.MESSAGE) else 2**30,
        )
    )
    assert 0 < logits <= (more + 1) * 2**30


def test_too_little_room_is_refused_with_what_is_enough() -> None:
    placement = choose("zb-v").place(4)
    problem = Problem(
        placement, 8, uniform(placement, 1, 1, 1), options=ScheduleOptions(vocab_parallel=ONE)
    )
    problem = replace(problem, memory_limit=MemoryLimit(microbatches=2.5))
    with pytest.raises(ValueError, match=r"adds 2 microbatches; give at least 3 microb"):
        build_program(choose("zb-v"), problem)


def test_one_communicator_is_refused() -> None:
    placement = choose("1f1b").place(2)
    with pytest.raises(ValueError, match="collectives need communicators of their own"):
        Problem(
            placement,
            2,
            uniform(placement, 1, 1, 1),
            options=ScheduleOptions(p2p=P2P.BATCHED, vocab_parallel=TWO),
        )


# --- time


def timed(
    name: str, head: float, how: VocabularyParallel, ranks: int, m: int
) -> tuple[float, float]:
    """Return the makespans without an output layer, and with one that takes as long as ``head``
    stages and is split over the ranks. A stage takes 3."""
    key = name, ranks, m
    placement = choose(name).place(ranks)
    layers = uniform(placement, 1, 1, 1)
    if key not in _BUILT:
        _BUILT[key] = choose(name).build(Problem(placement, m, layers))
    schedule = _BUILT[key]
    costs = layers.with_vocabulary(VocabularyCosts((head,) * 3))
    shared = share_vocabulary(costs, placement, how)
    problem = Problem(placement, m, shared, options=ScheduleOptions(vocab_parallel=how))
    divided = divide_vocabulary(schedule, problem)
    alone = simulate_unproved(schedule, problem.with_options(vocab_parallel=NONE)).makespan
    return alone, simulate_unproved(divided, problem).makespan


def test_collectives_of_shards_slow_the_layers() -> None:
    """Collectives of the split vocabulary slow down the layers that run at the same time, by the
    shares of the estimate. Costs that are given or measured are used as they are."""
    placement = choose("1f1b").place(4)
    layers = uniform(placement, 10.0, 12.0, 8.0)
    vocabulary = VocabularyCosts((8.0, 8.0, 8.0), launch=0.5, rescaling=4.0, contention=(0.1, 0.05))
    for how, passes in ((ONE, (2.5, 2.5)), (TWO, (4.5, 0.0))):
        shared = share_vocabulary(layers.with_vocabulary(vocabulary), placement, how).seconds
        slower = [shared[kind][1] for kind in PASSES]
        assert slower == pytest.approx([11.0, 12.6, 8.4])
        assert (shared[Kind.LOGITS][1], shared[Kind.LOGITS_INPUT][1]) == passes
        assert shared[Kind.LOGITS_WEIGHT][1] == 3.0
    given = share_vocabulary(layers.with_vocabulary(VocabularyCosts((8.0,) * 3)), placement, ONE)
    assert [given.seconds[kind][1] for kind in PASSES] == [10.0, 12.0, 8.0]


_BUILT: dict[tuple[str, int, int], Schedule] = {}


@pytest.mark.search
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-auto", "zb-v", "v-half", "v-min", "v-auto"])
def test_an_output_layer_costs_its_share(name: str) -> None:
    """A split output layer costs each rank its share. In an interval a rank runs all passes of one
    microbatch. A step takes as long as m intervals, plus the time in which the pipeline fills, plus
    one or two more intervals."""
    ranks, m = 8, 128 if IS_NIGHT else 24
    for head, how in zip((0.5, 1, 2, 4), itertools.cycle((ONE, TWO)), strict=False):
        alone, makespan = timed(name, head, how, ranks, m)
        interval = 3 + 3 * head / ranks
        fill = alone - 3 * m
        assert makespan <= 1.02 * (m * interval + fill + MORE[how] * interval), (head, how)


def test_1f1b_alone_pays_for_the_whole_output_layer() -> None:
    placement = choose("1f1b").place(8)
    for head in (0.5, 1, 2, 4):
        costs = uniform(placement, 1, 1, 1).with_vocabulary(VocabularyCosts((head,) * 3))
        program = build_program(choose("1f1b"), Problem(placement, 24, costs))
        assert simulate(program, costs).makespan >= 24 * 3 * (1 + head)
