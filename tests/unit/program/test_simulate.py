"""Tests of the simulator against published numbers, closed forms, tables drawn by hand and a second
simulator.

In the tables a column is a unit of time, ``.`` is idle, and ``=`` continues the action on its left.
A line ``0>1`` shows which microbatch is on its way from rank 0 to rank 1.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import prove
from megatron_ext.observe.program_summary import stock_1f1b, summarize
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs, PassCosts, uniform
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Offload, Problem
from megatron_ext.schedule.schedule import Schedule, is_compute
from megatron_ext.schedule.timeline import Timeline
from tests.helpers.combinations import at_night
from tests.helpers.random_schedules import PROPERTY, Case, cases
from tests.helpers.reference_runs import run
from tests.helpers.schedules import (
    B,
    F,
    I,
    W,
    drawn,
    line_problem,
    program,
    rows_of,
    table,
    with_messages,
    without_waits,
)


def simulated(name: str, problem: Problem) -> Timeline:
    return simulate(program(name, problem), problem.costs)


def simulated_rows(text: str, problem: Problem) -> Timeline:
    """Simulate the passes and messages of ``text``; the waits, which cost nothing, are added at the
    ends of the rows."""
    waits = {Kind.SEND_F: Kind.WAIT_F, Kind.SEND_B: Kind.WAIT_B}
    rows = tuple(
        row + tuple(a._replace(kind=waits[a.kind]) for a in row if a.kind in waits)
        for row in rows_of(text)
    )
    return simulate(prove(Schedule("written", problem.placement, rows), problem), problem.costs)


# --- published numbers and closed forms


@pytest.mark.parametrize(
    ("p", "m", "f", "i", "w", "comm", "one_f_one_b", "zb_h1"),
    [
        (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
        (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
        (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397),
        *at_night((32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421)),
    ],
)
def test_bubbles_of_the_zero_bubble_paper(
    p: int, m: int, f: float, i: float, w: float, comm: float, one_f_one_b: float, zb_h1: float
) -> None:
    """From the measured passes of the zero-bubble paper (Qi et al. 2024, tables 5 and 6), the
    simulator computes the paper's predicted bubbles, as shares of the span."""
    problem = line_problem(p, m, f, i, w, comm)
    assert round(simulated("1f1b", problem).bubble_share_span, 4) == one_f_one_b
    assert round(simulated("zb-h1", problem).bubble_share_span, 4) == zb_h1


def test_1f1b_takes_117_units() -> None:
    assert simulated("1f1b", line_problem(8, 32)).makespan == (32 + 8 - 1) * 3 == 117


few = st.integers(1, 6)
units = st.integers(1, 9)


@settings(PROPERTY, max_examples=50)
@given(p=few, m=st.integers(1, 12), f=units, i=units, w=units)
def test_bubble_of_1f1b(p: int, m: int, f: int, i: int, w: int) -> None:
    timeline = simulated("1f1b", line_problem(p, m, f, i, w))
    assert timeline.makespan == timeline.span == m * (f + i + w) + (p - 1) * (f + i + w)


@settings(PROPERTY, max_examples=50)
@given(p=few, m=st.integers(1, 12), f=units, i=units, w=units)
def test_bubble_of_zb_h1(p: int, m: int, f: int, i: int, w: int) -> None:
    """The published formula for the bubble of zb-h1 holds if W takes no longer than F and the
    microbatches fill the pipeline."""
    assume(w <= f and m >= p)
    timeline = simulated("zb-h1", line_problem(p, m, f, i, w))
    assert timeline.span == m * (f + i + w) + (p - 1) * (f + i - w)


# --- tables drawn by hand


def test_communication_of_1f1b() -> None:
    timeline = simulated("1f1b", line_problem(2, 3, comm=1))
    assert drawn(timeline, messages=True) == table(
        """
        0    F0 F1 .  .  .  .  B0 =  F2 B1 =  .  .  .  B2 =
        0>1  .  0  1  .  .  .  .  .  .  2  .  .  .  .  .  .
        1    .  .  F0 B0 =  F1 B1 =  .  .  F2 B2 =  .  .  .
        1>0  .  .  .  .  .  0  .  .  1  .  .  .  .  2  .  .
        """
    )


def test_i_lets_the_gradient_go_before_w() -> None:
    timeline = simulated("zb-h1", line_problem(2, 3, comm=1))
    assert drawn(timeline, messages=True) == table(
        """
        0    F0 F1 .  .  .  I0 W0 F2 I1 W1 .  .  I2 W2
        0>1  .  0  1  .  .  .  .  .  2  .  .  .  .  .
        1    .  .  F0 I0 F1 I1 W0 .  .  F2 I2 W1 W2 .
        1>0  .  .  .  .  0  .  1  .  .  .  .  2  .  .
        """
    )


def test_messages_of_a_channel_follow_one_another() -> None:
    """Messages of a channel follow one another: each takes three units and waits for the one before
    it."""
    problem = line_problem(2, 3, comm=3)
    timeline = simulated_rows(
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0RECV_B1 0RECV_B2 0B0 0B1 0B2
        1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2
        """,
        problem,
    )
    assert drawn(timeline, messages=True) == table(
        """
        0    F0 F1 F2 .  .  .  .  .  .  .  .  .  .  .  .  .  B0 =  .  B1 =  .  B2 =
        0>1  .  0  =  =  1  =  =  2  =  =  .  .  .  .  .  .  .  .  .  .  .  .  .  .
        1    .  .  .  .  F0 .  .  F1 .  .  F2 B0 =  B1 =  B2 =  .  .  .  .  .  .  .
        1>0  .  .  .  .  .  .  .  .  .  .  .  .  .  0  =  =  1  =  =  2  =  =  .  .
        """
    )


RECEIVED_AHEAD = """
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1
    1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
RECEIVED_LATE = """
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1
    1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1
    """


def test_rendezvous() -> None:
    """A message waits until its receiver has posted the receive. If the receive is not posted ahead
    of its use, rank 1 has to wait for the message."""
    problem = line_problem(2, 2, comm=1)
    assert drawn(simulated_rows(RECEIVED_AHEAD, problem), messages=True) == table(
        """
        0    F0 F1 .  .  .  .  B0 =  .  B1 =
        0>1  .  0  1  .  .  .  .  .  .  .  .
        1    .  .  F0 B0 =  F1 B1 =  .  .  .
        1>0  .  .  .  .  .  0  .  .  1  .  .
        """
    )
    assert drawn(simulated_rows(RECEIVED_LATE, problem), messages=True) == table(
        """
        0    F0 F1 .  .  .  .  B0 =  .  .  B1 =
        0>1  .  0  .  .  .  1  .  .  .  .  .  .
        1    .  .  F0 B0 =  .  F1 B1 =  .  .  .
        1>0  .  .  .  .  .  0  .  .  .  1  .  .
        """
    )


def test_neighbours_on_one_rank_send_nothing() -> None:
    """Neighbouring stages on one rank exchange no messages. In a V placement on two ranks, stages 1
    and 2 are both on rank 0."""
    placement = Placement("v", (1, 0, 0, 1))
    problem = Problem(placement, 1, uniform(placement, 2, 2, 2, 1))
    timeline = simulated_rows(
        """
        1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0
        0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0
        """,
        problem,
    )
    assert drawn(timeline, messages=True) == table(
        """
        0    .    .  1F0 2F0 .  .    .    .  .  2B0 =  1B0 =  .  .    .
        0>1  .    .  .   .   0  .    .    .  .  .   .  .   .  0  .    .
        1    0F0  .  .   .   .  3F0  3B0  =  .  .   .  .   .  .  0B0  =
        1>0  .    0  .   .   .  .    .    .  0  .   .  .   .  .  .    .
        """
    )


def test_makespan_and_span() -> None:
    """Makespan and span differ if ranks begin and end one after the other. Here each rank is busy
    during its whole span."""
    problem = line_problem(3, 4, forward_only=True)
    timeline = simulated("gpipe", problem)
    assert drawn(timeline) == table(
        """
        0  F0 F1 F2 F3 .  .
        1  .  F0 F1 F2 F3 .
        2  .  .  F0 F1 F2 F3
        """
    )
    assert (timeline.makespan, timeline.span, timeline.work) == (6, 4, 4)
    assert timeline.bubble_share_makespan == pytest.approx(2 / 6)
    assert timeline.bubble_share_span == 0


def test_work_is_the_mean_over_ranks() -> None:
    placement = Placement("line", (0, 1))
    costs = uniform(placement, 1, 1, 1)
    uneven = Costs(PassCosts(dict.fromkeys(costs.seconds, (1.0, 3.0))))
    timeline = simulated("gpipe", Problem(placement, 1, uneven))
    assert timeline.work == (3 + 9) / 2
    assert timeline.makespan == timeline.span == 12
    assert timeline.bubble_share_makespan == 0.5


# --- any schedule


@settings(PROPERTY, max_examples=60)
@given(cases)
def test_every_need_is_respected(case: Case) -> None:
    costs, rank_of = case.problem.costs, case.problem.placement.rank_of
    timeline = simulate(prove(with_messages(case.schedule, case.problem), case.problem), costs)
    for row in timeline.compute:
        for earlier, later in pairwise(row):
            assert earlier.end <= later.start, "two passes at once on a rank"

    events = {event.action: event for event in timeline.events}
    assert len(events) == len(timeline.events)

    def made(stage: int, kinds: tuple[Kind, ...], k: int, rank: int) -> float:
        """Return the time at which an output arrives on ``rank``: that of the pass of the first of
        ``kinds`` which the schedule has."""
        end = next(events[a].end for kind in kinds if (a := Action(stage, kind, k)) in events)
        return end + (costs.links.p2p_seconds if rank_of[stage] != rank else 0)

    slack = 1e-9
    for event in timeline.events:
        stage, kind, k = event.action
        if not is_compute(event.action):
            continue
        parts = (I, W) if kind is B else (kind,)
        seconds = sum(costs.seconds[part][stage] for part in parts)
        assert event.end - event.start == pytest.approx(seconds)
        assert event.rank == rank_of[stage]
        if kind is F and stage > 0:
            assert event.start >= made(stage - 1, (F,), k, event.rank) - slack
        if kind in (I, B):
            assert event.start >= made(stage, (F,), k, event.rank) - slack
            if stage < len(rank_of) - 1:
                assert event.start >= made(stage + 1, (I, B), k, event.rank) - slack
        if kind is W:
            assert event.start >= made(stage, (I,), k, event.rank) - slack


@settings(PROPERTY, max_examples=60)
@given(cases)
def test_a_simulator_of_another_make_agrees(case: Case) -> None:
    schedule = with_messages(case.schedule, case.problem)
    timeline = simulate(prove(schedule, case.problem), case.problem.costs)
    other = run(schedule, case.problem)
    assert other.ended_well
    for event in timeline.events:
        assert (event.start, event.end) == pytest.approx(other.times[event.action]), event


@settings(PROPERTY, max_examples=60)
@given(cases)
def test_waits_cost_nothing(case: Case) -> None:
    """Waits for sends cost nothing: every pass starts as early as in a schedule without them."""
    timeline = simulate(
        prove(with_messages(case.schedule, case.problem), case.problem), case.problem.costs
    )
    without = run(without_waits(case.schedule, case.problem), case.problem)
    assert not without.stuck
    for row in timeline.compute:
        for event in row:
            assert event.start == pytest.approx(without.times[event.action][0]), event


# --- the summary


def test_summary() -> None:
    problem = line_problem(4, 8, 1, 1, 1)
    text = summarize(program("zb-h1", problem))
    assert text == (
        "zb-h1 on 4 ranks, 8 microbatches: predicted bubble 11.1% of the makespan (1f1b 27.3%), "
        "peak 4 microbatches; costs given (of a microbatch on one rank): f=1,i=1,w=1,comm=0"
    )


def test_summary_says_what_is_offloaded() -> None:
    problem = line_problem(4, 8, 1, 1, 1)
    costs = problem.costs.with_host([0.5] * 4, [0.5] * 4)
    text = summarize(
        program(
            "zb-h1", replace(problem, costs=costs).with_options(activation_offload=Offload.HALF)
        )
    )
    assert (
        "peak 4 microbatches; offload half: 31% of the activations and 31% of the inputs of W "
        "leave, the rest stays (at most 2 microbatches of a rank on the host); costs"
    ) in text


def test_summary_says_how_many_passes_overlap() -> None:
    placement = Placement("v", (1, 0, 0, 1))
    problem = Problem(placement, 8, uniform(placement, 1, 1, 1)).with_options(pairs=True)
    made = program("zb-v", problem)
    pairs = len(made.schedule.pairs)
    assert f"; {pairs} of 32 forward passes overlap a backward pass; costs" in summarize(made)


def test_summary_compares_with_1f1b_of_the_same_work() -> None:
    """The summary compares a schedule with 1F1B of the same work: the two chunks of a rank become
    one stage of twice the cost."""
    placement = Placement("loop", (0, 1, 0, 1))
    problem = Problem(placement, 4, uniform(placement, 2, 4, 6))
    stock = stock_1f1b(problem)
    assert stock.schedule.placement.rank_of == (0, 1)
    assert stock.makespan == (4 + 1) * 12
