"""Tests of messages that share one communicator: which ones are sent in one batch, in which order,
and which orders are refused."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given

from megatron_ext.compile.program.graph import batches_of
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import InvalidSchedule, prove
from megatron_ext.compile.registry import choose, entries
from megatron_ext.compile.transforms.omitted_backward import keep_forward
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, uniform
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import P2P, Problem, ScheduleOptions
from tests.helpers.random_schedules import (
    PROPERTY,
    random_costs,
    random_placement,
    random_schedule,
    seeds,
)
from tests.helpers.reference_runs import run, runs_to_end
from tests.helpers.schedules import (
    drawn,
    line_problem,
    program,
    rows_of,
    table,
    with_messages,
    written,
)


def batched(problem: Problem) -> Problem:
    return problem.with_options(p2p=P2P.BATCHED)


def test_a_send_moves_with_the_receives_before_it_and_other_receives_alone() -> None:
    (row,) = rows_of(
        "1RECV_F0 1RECV_B0 1F0 1RECV_F1 1RECV_B1 1SEND_F0 1SEND_B0 1RECV_F2 1WAIT_F0 1SEND_F1 "
        "1RECV_F3"
    )
    batches = [" ".join(str(row[position]) for position in batch) for batch in batches_of(row)]
    assert batches == [
        "1RECV_F0",
        "1RECV_B0",
        "1RECV_F1 1RECV_B1 1SEND_F0",
        "1SEND_B0",
        "1RECV_F2",
        "1SEND_F1",
        "1RECV_F3",
    ]


def test_two_neighbours_whose_passes_end_together_swap_in_one_batch() -> None:
    """Two neighbours whose passes end together swap their messages in one batch. In 1F1B with equal
    passes, 0F2 and 1B1 end at the same time."""
    problem = batched(line_problem(2, 3))
    assert program("1f1b", problem).schedule.rows == rows_of(
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0WAIT_F0 0WAIT_F1 0B0 0F2 0RECV_B1 0SEND_F2 0WAIT_F2 0B1 0RECV_B2 0B2
        1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1WAIT_B0 1WAIT_B1 1F2 1B2 1SEND_B2 1WAIT_B2
        """  # noqa: E501
    )


# Rows that hang. In each case a rank receives a gradient before it sends an activation that the
# gradient depends on, or the other way round. With a communicator for each kind of message the rows
# would not hang.
HANGS = {
    "posted ahead": (
        """
        0RECV_B0 0F0 0SEND_F0 0B0 0WAIT_F0
        1RECV_F0 1F0 1B0 1SEND_B0 1WAIT_B0
        """,
        1,
        "0RECV_B0 waits for 1SEND_B0 waits for 1B0 waits for 1F0 waits for 1RECV_F0 waits for "
        "0SEND_F0 waits for 0RECV_B0",
    ),
    "neither lets the other go first": (
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0WAIT_F0 0WAIT_F1
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1WAIT_B0 1WAIT_B1
        """,
        2,
        "0SEND_F1 waits for 1SEND_B0 waits for 0SEND_F1",
    ),
}


@pytest.mark.parametrize("case", HANGS)
def test_an_order_that_only_channels_of_their_own_allow(case: str) -> None:
    text, microbatches, cycle = HANGS[case]
    schedule = written(text, (0, 1))
    problem = line_problem(2, microbatches)
    assert runs_to_end(schedule, problem)
    with pytest.raises(InvalidSchedule) as refusal:
        prove(schedule, batched(problem))
    assert f"it would hang: {cycle}" in str(refusal.value)
    assert not runs_to_end(schedule, batched(problem))


def test_a_swap_that_hangs_in_two_batches_runs_in_one() -> None:
    """A swap of messages that would hang in two batches runs in one: each send is batched with the
    receive in which the other rank waits."""
    together = """
        0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1 0WAIT_F0 0WAIT_F1
        1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1 1WAIT_B0 1WAIT_B1
        """
    problem = batched(line_problem(2, 2, comm=1))
    timeline = simulate(prove(written(together, (0, 1)), problem), problem.costs)
    assert drawn(timeline, messages=True) == table(
        """
        0   F0 F1 .  .  .  .  B0 =  .  .  B1 =
        0>1 .  0  .  .  .  1  .  .  .  .  .  .
        1   .  .  F0 B0 =  .  F1 B1 =  .  .  .
        1>0 .  .  .  .  .  0  .  .  .  1  .  .
        """
    )


def test_activations_and_gradients_to_one_rank_may_not_cross() -> None:
    """Activations and gradients to the same rank may not overtake one another. On the last rank of
    a V placement both go to its neighbour, and the k-th message that leaves meets the k-th receive,
    whichever kind it is."""
    good = """
        1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 1F1 2F1 2SEND_F1 2RECV_B0 2B0 1B0 1SEND_B0 2RECV_B1 2B1 1B1 1SEND_B1 2WAIT_F0 2WAIT_F1 1WAIT_B0 1WAIT_B1
        0F0 0SEND_F0 3RECV_F0 3F0 0F1 0SEND_F1 3B0 3RECV_F1 3SEND_B0 3F1 3B1 0RECV_B0 3SEND_B1 0RECV_B1 0B0 0B1 0WAIT_F0 0WAIT_F1 3WAIT_B0 3WAIT_B1
        """  # noqa: E501
    placement = Placement("v", (1, 0, 0, 1))
    problem = Problem(placement, 2, uniform(placement, 1, 1, 1))
    crossed = good.replace(
        "0F1 0SEND_F1 3B0 3RECV_F1 3SEND_B0", "3B0 3SEND_B0 0F1 0SEND_F1 3RECV_F1"
    )
    prove(written(good, placement.rank_of), batched(problem))
    assert runs_to_end(written(crossed, placement.rank_of), problem)
    with pytest.raises(
        InvalidSchedule, match="cross from rank 1 to rank 0: 3SEND_B0 would meet 1R"
    ):
        prove(written(crossed, placement.rank_of), batched(problem))


def test_ranks_tell_by_their_digests_that_one_batches_and_one_does_not() -> None:
    """If one rank batches its messages and another does not, their digests differ. With two ranks
    and one microbatch, batched and single messages give the same rows of actions, so the rows
    cannot show the difference."""
    problem = line_problem(2, 1, forward_only=True)
    plain, other = program("gpipe", problem), program("gpipe", batched(problem))
    assert plain.schedule.rows == other.schedule.rows and plain.digest != other.digest


# --- any schedule

# Searches take seconds, and their tables are like those of other families on the same placement.
FAMILIES = sorted(name for name, entry in entries().items() if not entry.traits.searches)


@pytest.mark.parametrize("spec", [*FAMILIES, "gis:vpp=3", "hanayo:waves=1"])
def test_every_family_is_sound(spec: str) -> None:
    """Every family's schedule is sound with batched messages: with equal passes, many of which end
    together, and with random ones, in training and in evaluation."""
    random = Random(spec)
    resolved = choose(spec)
    for p in (2, random.choice([3, 4, 5])):
        placement = resolved.place(p)
        for costs in (uniform(placement, 1, 1, 1, 1), random_costs(random, placement)):
            problem = batched(Problem(placement, p * random.randint(1, 3), costs))
            schedule = resolved.build(problem)
            proved = prove(with_messages(schedule, problem), problem)
            assert proved.schedule.compute_rows == schedule.rows
            assert runs_to_end(proved.schedule, problem)
            problem = replace(problem, forward_only=True)
            schedule = keep_forward(schedule, problem)
            proved = prove(with_messages(schedule, problem), problem)
            assert runs_to_end(proved.schedule, problem)


def costs_with_ties(random: Random, placement: Placement) -> Costs:
    """Return costs with which many passes end together, and some passes and messages take no
    time."""
    f, i, w, comm = random.choice([(1, 1, 1, 0), (1, 1, 1, 1), (0, 0, 1, 0), (2, 1, 0, 1)])
    return uniform(placement, f, i, w, comm)


@PROPERTY
@given(seeds)
def test_every_order_of_passes_is_sound_whatever_ends_together(seed: int) -> None:
    random = Random(seed)
    placement = random_placement(random)
    forward_only = random.random() < 0.3
    problem = Problem(
        placement,
        random.randint(1, 12 if forward_only else 5),
        costs_with_ties(random, placement),
        forward_only=forward_only,
        options=ScheduleOptions(p2p=P2P.BATCHED),
    )
    schedule = random_schedule(random, problem)
    if forward_only:
        schedule = keep_forward(schedule, problem)
    proved = prove(with_messages(schedule, problem), problem)
    assert proved.schedule.compute_rows == schedule.rows
    assert runs_to_end(proved.schedule, problem)
    assert run(proved.schedule, problem, held_up=True).ended_well


def test_an_evaluation_whose_passes_cost_nothing() -> None:
    """The messages of an evaluation are put in order even if its passes take no time. The time step
    in which the order is found is a share of the longest pass, which is 0 here."""
    problem = line_problem(3, 4, 0, 1, 1, forward_only=True)
    assert set(problem.costs.seconds[Kind.FORWARD]) == {0}
    program("gpipe", batched(problem))


def test_an_order_whose_passes_wait_for_one_another_is_shown() -> None:
    """The error shows an order of passes that deadlocks. Messages are ordered by the times of
    passes, and such an order has no times."""
    order = written("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", (0, 1))
    problem = batched(line_problem(2, 2))
    with pytest.raises(InvalidSchedule, match="it would hang: "):
        prove(with_messages(order, problem), problem)
