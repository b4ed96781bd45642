"""Tests of the proof of a program: what it refuses, with which message, and that it refuses exactly
the programs that cannot run."""

import copy
import pickle
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.graph import Device, build_graph
from megatron_ext.compile.program.verify import InvalidSchedule, Program, check_compute, prove
from megatron_ext.compile.registry import choose
from megatron_ext.compile.transforms.omitted_backward import keep_forward
from megatron_ext.schedule.action import Action, Kind, parse_action
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import P2P, Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule
from tests.helpers.random_schedules import (
    PROPERTY,
    Case,
    cases,
    mutate,
    random_case,
    random_costs,
    random_placement,
    random_schedule,
    seeds,
)
from tests.helpers.reference_runs import run, runs_to_end
from tests.helpers.schedules import line_problem, program, rows_of, with_messages, written

PROBLEM = line_problem(2, 2)
FUSED = """
0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0WAIT_F0 0B0 0RECV_B1 0WAIT_F1 0B1
1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1WAIT_B0 1WAIT_B1
"""
SPLIT = """
0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0WAIT_F0 0I0 0RECV_B1 0W0 0WAIT_F1 0I1 0W1
1RECV_F0 1RECV_F1 1F0 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1 1WAIT_B0 1WAIT_B1
"""


def on_line(text: str) -> Schedule:
    return written(text, (0, 1))


def refusal(schedule: Schedule, problem: Problem) -> InvalidSchedule:
    with pytest.raises(InvalidSchedule) as caught:
        prove(schedule, problem)
    assert schedule.name in str(caught.value)
    for action in caught.value.actions:
        assert str(action) in str(caught.value)
    return caught.value


@pytest.mark.parametrize(("name", "text"), [("1f1b", FUSED), ("zb-h1", SPLIT)])
def test_the_good_ones_below_are_good(name: str, text: str) -> None:
    assert prove(on_line(text), PROBLEM).schedule.rows == program(name, PROBLEM).schedule.rows


# Each case replaces a text in a good schedule, and has the refusal's text and the actions that it
# names.
REFUSALS = {
    "compute missing": (
        FUSED, "0F1 0SEND_F1", "0SEND_F1",
        "0F1 is missing on rank 0: nothing does the forward", ["0F1"],
    ),
    "backward missing": (
        FUSED, "0WAIT_F1 0B1", "0WAIT_F1",
        "0B1 is missing on rank 0: nothing does the input gradient", ["0B1"],
    ),
    "weight gradient missing": (
        SPLIT, "1W0 1W1", "1W1",
        "1W0 is missing on rank 1: nothing does the weight gradient", ["1W0"],
    ),
    "send missing": (
        FUSED, "0F1 0SEND_F1", "0F1",
        "0SEND_F1 is missing on rank 0: nothing does the send of the output", ["0SEND_F1"],
    ),
    "receive missing": (
        FUSED, "0RECV_B1", "",
        "0RECV_B1 is missing on rank 0: nothing does the receive of the output's gradient",
        ["0RECV_B1"],
    ),
    "wait missing": (
        FUSED, "1WAIT_B1", "",
        "1WAIT_B1 is missing on rank 1: nothing does the wait for the gradient's send",
        ["1WAIT_B1"],
    ),
    "compute twice": (
        FUSED, "1F1 1B1", "1F1 1F1 1B1", "1F1 does the forward a second time", ["1F1"],
    ),
    "message twice": (
        FUSED, "1SEND_B1", "1SEND_B1 1SEND_B1",
        "1SEND_B1 does the send of the input's gradient a second time", ["1SEND_B1"],
    ),
    "B beside I and W": (
        SPLIT, "1I1", "1I1 1B1", "1B1 does the input gradient a second time", ["1B1"],
    ),
    "W beside B": (
        FUSED, "1B1", "1B1 1W1", "1W1 does the weight gradient a second time", ["1W1"],
    ),
    "wrong rank": (
        FUSED, "1F1 1B1", "0B1 1F1 1B1", "0B1 is on rank 1; stage 0 is on rank 0", ["0B1"],
    ),
    "wrong stage": (FUSED, "1F1", "2F1", "2F1 is of stage 2, and", ["2F1"]),
    "wrong microbatch": (FUSED, "1F1", "1F2", "1F2 is of microbatch 2,", ["1F2", "1F1"]),
    "message beyond the end": (
        FUSED, "1F1", "1F1 1SEND_F1", "1SEND_F1 has no other rank to talk to", ["1SEND_F1"],
    ),
    "I before its F": (
        SPLIT, "1F1 1I1 1SEND_B1", "1I1 1SEND_B1 1F1",
        "1I1 comes before 1F1, which it needs", ["1I1", "1F1"],
    ),
    "W before its I": (
        SPLIT, "0I1 0W1", "0W1 0I1", "0W1 comes before 0I1, which it needs", ["0W1", "0I1"],
    ),
    "send before its F": (
        FUSED, "0F1 0SEND_F1", "0SEND_F1 0F1",
        "0SEND_F1 comes before 0F1, which it needs", ["0SEND_F1", "0F1"],
    ),
    "receive after its use": (
        FUSED, "0RECV_B1 0WAIT_F1 0B1", "0WAIT_F1 0B1 0RECV_B1",
        "0B1 comes before 0RECV_B1, which it needs", ["0B1", "0RECV_B1"],
    ),
    "wait before its send": (
        FUSED, "0SEND_F0 0F1 0SEND_F1 0RECV_B0 0WAIT_F0", "0WAIT_F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0",
        "0WAIT_F0 comes before 0SEND_F0, which it needs", ["0WAIT_F0", "0SEND_F0"],
    ),
    "crossed receives": (
        FUSED, "1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0",
        "messages cross from rank 0 to rank 1: 0SEND_F0 would meet 1RECV_F1, not 1RECV_F0",
        ["0SEND_F0", "1RECV_F1"],
    ),
    "crossed sends": (
        FUSED, "0SEND_F0 0F1 0SEND_F1", "0F1 0SEND_F1 0SEND_F0",
        "messages cross from rank 0 to rank 1: 0SEND_F1 would meet 1RECV_F0, not 1RECV_F1",
        ["0SEND_F1", "1RECV_F0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(case: str) -> None:
    good, old, new, message, actions = REFUSALS[case]
    assert good.count(old) == 1
    error = refusal(on_line(good.replace(old, new)), PROBLEM)
    assert message in str(error)
    assert error.actions == tuple(map(parse_action, actions))


def test_cyclic_wait_of_passes_is_shown() -> None:
    """The error shows a cyclic wait of passes: rank 0 waits for a gradient before it sends the
    input of 1F1, which rank 1 needs before it computes that gradient."""
    error = refusal(
        on_line(
            """
            0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1 0WAIT_F0 0WAIT_F1
            1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1WAIT_B0 1WAIT_B1
            """
        ),
        PROBLEM,
    )
    assert (
        "it would hang: 0RECV_B0 waits for 1SEND_B0 waits for 1B0 waits for 1F1 waits for 1RECV_F1 "
        "waits for 0SEND_F1 waits for 0F1 waits for 0B0 waits for 0RECV_B0"
    ) in str(error)
    assert len(error.actions) == 8


def test_cyclic_wait_of_blocking_sends_is_shown() -> None:
    """The error shows a cyclic wait of blocking sends: each rank waits until its send has ended
    before it posts the receive of the other's."""
    error = refusal(
        on_line(
            """
            0F0 0SEND_F0 0WAIT_F0 0F1 0SEND_F1 0WAIT_F1 0RECV_B0 0RECV_B1 0B0 0B1
            1RECV_F0 1F0 1B0 1SEND_B0 1WAIT_B0 1RECV_F1 1F1 1B1 1SEND_B1 1WAIT_B1
            """
        ),
        PROBLEM,
    )
    assert (
        "it would hang: 0SEND_F1 waits for 1WAIT_B0 waits for 1SEND_B0 waits for 0WAIT_F1 waits "
        "for 0SEND_F1"
    ) in str(error)
    assert error.actions == tuple(
        map(parse_action, ["0SEND_F1", "1WAIT_B0", "1SEND_B0", "0WAIT_F1"])
    )


def test_wrong_number_of_rows() -> None:
    schedule = replace(on_line(FUSED), rows=on_line(FUSED).rows[:1])
    assert "it has 1 row for 2 ranks" in str(refusal(schedule, PROBLEM))


def test_another_placement() -> None:
    schedule = written(FUSED, (1, 0))
    error = refusal(schedule, PROBLEM)
    assert (
        "its placement has the stages on ranks (1, 0), and that of the pipeline on ranks (0, 1)"
        in str(error)
    )


def test_a_schedule_for_another_number_of_microbatches() -> None:
    schedule = program("1f1b", line_problem(2, 2)).schedule
    error = refusal(schedule, line_problem(2, 3))
    assert error.actions == (parse_action("0F2"),)
    error = refusal(schedule, line_problem(2, 1))
    assert error.actions == (parse_action("0F1"),)


# --- evaluation


def test_an_evaluation_does_nothing_but_forwards() -> None:
    """An evaluation that runs anything but forward passes is refused.

    A training step used to be accepted as an evaluation, as no action was missing and none came
    twice. It would change the gradients of the weights.
    """
    error = refusal(on_line(FUSED), replace(PROBLEM, forward_only=True))
    assert "0RECV_B0" in str(error)
    assert error.actions == (parse_action("0RECV_B0"),)


def test_half_a_message_in_an_evaluation() -> None:
    """An evaluation in which a message has only one end is refused. It used to end in a
    KeyError."""
    evaluation = replace(PROBLEM, forward_only=True)
    good = program("gpipe", evaluation).schedule
    prove(good, evaluation)
    rows = (good.rows[0], (*good.rows[1], parse_action("1SEND_B0")))
    assert refusal(replace(good, rows=rows), evaluation).actions == (parse_action("1SEND_B0"),)


# --- the order of the data

# The n-th forward pass of a stage reads the n-th microbatch of the stage's own iterator. A table
# whose stages read microbatches in different orders used to be accepted: tokens met the labels of
# other microbatches, and the training learned nothing, without an error.


@pytest.mark.parametrize("forward_only", [False, True])
def test_stages_that_read_their_data_in_different_orders(forward_only: bool) -> None:
    rows = "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F2 1F1 1B0 1B1 1B2"
    if forward_only:
        rows = "0F0 0F1 0F2\n1F0 1F2 1F1"
    problem = replace(line_problem(2, 3), forward_only=forward_only)
    with pytest.raises(InvalidSchedule) as caught:
        prove(with_messages(on_line(rows), problem), problem)
    assert "1F2 is the forward number 2 of stage 1, and 0F1 is the forward number 2 of stage 0" in (
        str(caught.value)
    )
    assert caught.value.actions == (parse_action("1F2"), parse_action("0F1"))


def test_one_order_of_the_data_may_be_any() -> None:
    """All stages must read microbatches in the same order, but any order will do. Backward passes
    may overtake one another; forward passes only if they do so on all stages."""
    good = on_line("0F1 0F0 0B0 0B1\n1F1 1F0 1B0 1B1")
    proved = prove(with_messages(good, PROBLEM), PROBLEM)
    assert runs_to_end(proved.schedule, PROBLEM)
    evaluation = replace(PROBLEM, forward_only=True)
    prove(with_messages(keep_forward(good, evaluation), evaluation), evaluation)


def test_a_rank_reads_in_one_order_for_each_of_its_stages() -> None:
    placement = Placement("v", (0, 0))
    problem = Problem(placement, 2, uniform(placement, 1, 1, 1))
    crossed = Schedule("v", placement, rows_of("0F0 0F1 1F1 1F0 1B0 1B1 0B0 0B1"))
    assert refusal(crossed, problem).actions == (parse_action("1F1"), parse_action("0F0"))


def test_tokens_are_sent_in_the_order_of_the_forward_passes() -> None:
    """If the vocabulary is split over the ranks, tokens are sent in the order of the forward
    passes. The first stage then reads its data when it sends the tokens."""
    problem = line_problem(2, 2).with_options(vocab_parallel=VocabularyParallel.TWO)
    good = program("1f1b", problem)

    def renamed(action: Action) -> Action:
        is_sent = action.kind is Kind.BCAST_E
        return action._replace(microbatch=1 - action.microbatch) if is_sent else action

    rows = tuple(tuple(map(renamed, row)) for row in good.schedule.rows)
    error = refusal(replace(good.schedule, rows=rows), good.problem)
    assert "number 1 of stage 0" in str(error)


# --- memory


def with_bytes(activation: float, weight_inputs: float) -> Problem:
    costs = PROBLEM.costs.with_passes(
        held_bytes={Held.ACTIVATION: (activation,) * 2, Held.WEIGHT_INPUTS: (weight_inputs,) * 2}
    )
    return replace(PROBLEM, costs=costs)


def test_limit_in_microbatches() -> None:
    """A limit in microbatches is checked. On rank 0, 1F1B holds two microbatches from 0F1 on."""
    prove(on_line(FUSED), replace(PROBLEM, memory_limit=MemoryLimit(microbatches=2)))
    error = refusal(on_line(FUSED), replace(PROBLEM, memory_limit=MemoryLimit(microbatches=1.5)))
    assert error.actions == (parse_action("0F1"),)
    assert "0F1 brings rank 0 over the memory limit of 1.5 microbatches" in str(error)
    assert "peak there is 2 microbatches" in str(error)


def test_limit_in_bytes() -> None:
    """A limit in bytes is checked. After 1I1, rank 1 of zb-h1 holds the inputs of W of both
    microbatches, 6 GiB; rank 0 holds 5 GiB at most."""
    problem = with_bytes(2.5 * 2**30, 3 * 2**30)
    prove(on_line(SPLIT), replace(problem, memory_limit=MemoryLimit(bytes=6 * 2**30)))
    limited = replace(problem, memory_limit=MemoryLimit(bytes=int(5.75 * 2**30)))
    error = refusal(on_line(SPLIT), limited)
    assert error.actions == (parse_action("1W0"),)
    assert "1W0 brings rank 1 over the memory limit of 5.75GiB" in str(error)
    assert "peak there is 6GiB" in str(error)


def test_limit_in_bytes_needs_bytes() -> None:
    limited = replace(PROBLEM, memory_limit=MemoryLimit(bytes=2**30))
    with pytest.raises(ValueError, match=r"limit is 1GiB, but the costs \(given\) have no bytes"):
        prove(on_line(FUSED), limited)


# --- programs


def test_only_prove_makes_programs() -> None:
    proved = prove(on_line(FUSED), PROBLEM)
    with pytest.raises(TypeError, match="made by prove"):
        Program(proved.schedule, proved.problem, object())


def test_a_program_cannot_be_given_another_schedule() -> None:
    """A program that `prove` has made cannot be given another schedule. `dataclasses.replace` used
    to copy the seal of such a program to a schedule that was never checked."""
    proved = prove(on_line(FUSED), PROBLEM)
    with pytest.raises((TypeError, ValueError)):
        replace(proved, schedule=on_line(FUSED))  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        proved.schedule = on_line(SPLIT)  # type: ignore[misc]


def test_different_programs_have_different_digests() -> None:
    proved = prove(on_line(FUSED), PROBLEM)
    assert prove(on_line(FUSED), PROBLEM).digest == proved.digest
    assert copy.deepcopy(proved).digest == proved.digest
    assert program("1f1b", PROBLEM).digest == proved.digest, "the name changes nothing"
    other_costs = replace(PROBLEM, costs=line_problem(2, 2, 3, 2, 1).costs)
    assert prove(on_line(FUSED), other_costs).digest == proved.digest

    later_wait = FUSED.replace("0WAIT_F1 0B1", "0B1 0WAIT_F1")
    others = [
        prove(on_line(SPLIT), PROBLEM),
        prove(on_line(later_wait), PROBLEM),
        program("1f1b", line_problem(2, 3)),
        program("1f1b", line_problem(1, 2)),
    ]
    digests = {proved.digest, *(other.digest for other in others)}
    assert len(digests) == 1 + len(others)


def test_different_placements_have_different_digests() -> None:
    first, other = Placement("x", (0, 0, 1, 1)), Placement("x", (0, 1, 1, 0))
    costs = random_costs(Random(0), first)
    digests = set()
    for placement in (first, other):
        problem = Problem(placement, 1, costs)
        schedule = random_schedule(Random(0), problem)
        digests.add(prove(with_messages(schedule, problem), problem).digest)
    assert len(digests) == 2


def test_a_refusal_travels_between_processes() -> None:
    error = refusal(on_line(FUSED.replace("1F1", "")), PROBLEM)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.actions) == (str(error), error.actions)


# --- any schedule


@PROPERTY
@given(cases)
def test_transforms_keep_a_good_schedule_good(case: Case) -> None:
    proved = prove(with_messages(case.schedule, case.problem), case.problem)
    assert proved.schedule.compute_rows == case.schedule.rows
    assert runs_to_end(proved.schedule, case.problem)


@PROPERTY
@given(seeds)
def test_transforms_keep_a_good_evaluation_good(seed: int) -> None:
    """Transforms keep a sound evaluation sound. Some evaluations used to hang, as a transform added
    waits where no proof covered them."""
    random = Random(seed)
    placement = random_placement(random)
    microbatches = random.randint(1, 12)
    problem = Problem(
        placement,
        microbatches,
        random_costs(random, placement),
        forward_only=True,
        options=ScheduleOptions(p2p=random.choice(list(P2P))),
    )
    forwards = keep_forward(random_schedule(random, problem), problem)
    proved = prove(with_messages(forwards, problem), problem)
    assert proved.schedule.compute_rows == forwards.rows
    assert runs_to_end(proved.schedule, problem)


def test_an_evaluation_with_a_rank_far_ahead() -> None:
    """An evaluation in which one rank runs far ahead is sound. It used to hang at waits for sends.

    Rank 0 runs stage 0 for all microbatches and only then stage 2. Rank 1 takes the outputs of
    stage 0 one by one, and between them those of stage 2, which arrive by way of rank 2.
    """
    m = 12
    schedule = written(
        "\n".join(
            [
                " ".join([*(f"0F{k}" for k in range(m)), *(f"2F{k}" for k in range(m))]),
                " ".join(f"1F{k} 4F{k}" for k in range(m)),
                " ".join(f"3F{k}" for k in range(m)),
            ]
        ),
        (0, 1, 0, 2, 1),
    )
    costs = random_costs(Random(0), schedule.placement)
    problem = Problem(schedule.placement, m, costs, forward_only=True)
    proved = prove(with_messages(schedule, problem), problem)
    assert proved.schedule.compute_rows == schedule.rows
    assert runs_to_end(proved.schedule, problem)


def refusal_or_none(schedule: Schedule, problem: Problem) -> InvalidSchedule | None:
    try:
        proved = prove(schedule, problem)
    except InvalidSchedule as error:
        return error
    assert proved.schedule is schedule
    return None


def verdict_of(error: InvalidSchedule | None) -> str:
    """Return the verdict of ``prove``: "runs", "refused", "hangs" or "hangs on a device"."""
    if error is None:
        return "runs"
    if "it would hang on a device" in str(error):
        return "hangs on a device"
    return "hangs" if "it would hang" in str(error) else "refused"


def assert_verdict_is_right(schedule: Schedule, problem: Problem) -> None:
    """Assert that ``prove`` and the independent simulation agree on ``schedule``."""
    ran, held_up = run(schedule, problem), run(schedule, problem, held_up=True)
    error = refusal_or_none(schedule, problem)
    verdict = verdict_of(error)
    if error is None:
        for way in (ran, held_up):
            assert way.ended_well, f"proved, but stuck at {way.stuck}, fault: {way.fault}"
    elif verdict == "hangs on a device":
        assert ran.ended_well, f"not only there: {error}"
        assert held_up.stuck, f"said to hang, but: {held_up.fault}"
        assert_waits_in_a_circle(schedule, problem, error, Device.ONE_QUEUE)
    else:
        assert not ran.ended_well, f"refused, but it runs: {error}"
        if verdict == "hangs":
            assert ran.stuck, f"said to hang, but: {ran.fault}"
            assert_waits_in_a_circle(schedule, problem, error)


def assert_waits_in_a_circle(
    schedule: Schedule,
    problem: Problem,
    error: InvalidSchedule,
    device: Device = Device.PARALLEL,
) -> None:
    graph = build_graph(schedule, problem.options.p2p, device)
    cycle = [graph.actions.index(action) for action in error.actions]
    for node, earlier in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        assert earlier in graph.before[node]
    path = " waits for ".join(map(str, [*error.actions, error.actions[0]]))
    assert path in str(error)


def damaged(case: Case, seed: int) -> Schedule:
    return mutate(with_messages(case.schedule, case.problem), Random(seed))


def disordered(case: Case, seed: int) -> Schedule:
    """Swap two passes of a rank before messages are added."""
    random = Random(seed)
    rows = [list(row) for row in case.schedule.rows]
    row = random.choice(rows)
    position, other = random.randrange(len(row)), random.randrange(len(row))
    row[position], row[other] = row[other], row[position]
    return replace(case.schedule, rows=tuple(map(tuple, rows)))


@settings(PROPERTY, max_examples=200)
@given(cases, seeds)
def test_prove_refuses_exactly_what_cannot_run(case: Case, seed: int) -> None:
    assert_verdict_is_right(damaged(case, seed), case.problem)


@settings(PROPERTY, max_examples=120)
@given(cases, seeds)
def test_prove_refuses_exactly_the_orders_that_cannot_run(case: Case, seed: int) -> None:
    schedule = disordered(case, seed)
    try:
        check_compute(schedule, case.problem)
    except InvalidSchedule:
        assert not runs_to_end(schedule, case.problem)
        return
    assert_verdict_is_right(with_messages(schedule, case.problem), case.problem)


def test_damage_is_of_all_sorts() -> None:
    """Random damage yields schedules with all four verdicts: they run, are refused, hang, or hang
    only on a device that blocks. If no damaged schedule ran, or none hung, the two tests of what
    `prove` refuses, which use the same damage, would show nothing."""
    kinds = ("runs", "refused", "hangs", "hangs on a device")
    counts: Counter[str] = Counter()
    for seed in range(500):
        case = random_case(seed)
        counts[verdict_of(refusal_or_none(damaged(case, seed), case.problem))] += 1
        if min(counts[kind] for kind in kinds) >= 5:
            break
    else:
        pytest.fail(f"{counts}")


def test_a_file_that_would_hang_is_refused_and_not_crashed_on() -> None:
    """A schedule file that would hang is refused without a crash, through every transform between
    the file and the proof."""
    order = on_line("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    resolved = replace(choose("1f1b"), spec="order.csv", build=lambda problem: order)
    with pytest.raises(InvalidSchedule, match="it would hang: 0RECV_B0 waits for "):
        build_program(resolved, PROBLEM)
