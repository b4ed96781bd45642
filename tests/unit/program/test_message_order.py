"""Tests of the one order of all passes, messages and collectives, in which nothing that is posted
needs something later.

A GPU may block its host and all its streams behind anything posted. There, a receive deadlocks if
its message depends on a later pass of the same rank. On gloo it does not, so only the proof can
find it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.graph import Device, Graph, build_graph, partner_of
from megatron_ext.compile.program.memory import held_during, in_bytes, peaks
from megatron_ext.compile.program.node_lists import NodeLists
from megatron_ext.compile.program.simulate import simulate, simulate_unproved
from megatron_ext.compile.program.verify import InvalidSchedule, Program, prove
from megatron_ext.compile.registry import choose, entries
from megatron_ext.schedule.action import Kind, parse_action
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.kinds import HOST_LANES, RULES, Held, Lane
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Offload, Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule, is_compute
from tests.helpers.combinations import in_pairs
from tests.helpers.random_schedules import PROPERTY, random_case, seeds
from tests.helpers.reference_runs import run
from tests.helpers.schedules import line_problem, program, rows_of, with_messages, written

# Searches take seconds, and their tables are like those of other families on the same placement.
FAMILIES = sorted(name for name, entry in entries().items() if not entry.traits.searches)


def test_a_receive_stands_where_its_message_is_made() -> None:
    """A receive is posted when its message is computed: rank 0 posts 0RECV_B0 when 1B0 ends, and
    not before its own forward passes, which 1B0 needs. Receives used to be posted ahead of their
    use."""
    assert program("1f1b", line_problem(2, 2)).schedule.rows == rows_of(
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0WAIT_F0 0B0 0RECV_B1 0WAIT_F1 0B1
        1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1WAIT_B0 1WAIT_B1
        """
    )


def test_a_receive_posted_ahead_is_refused() -> None:
    """A receive that is posted ahead is refused.

    The project used to post receives ahead, which is sound if streams run in parallel. It deadlocks
    on a device where 0RECV_B0 blocks 0F0.
    """
    ahead = written(
        """
        0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0WAIT_F0 0B0 0WAIT_F1 0B1
        1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1WAIT_B0 1WAIT_B1
        """,
        (0, 1),
    )
    problem = line_problem(2, 2)
    assert run(ahead, problem).ended_well
    assert not run(ahead, problem, held_up=True).ended_well
    with pytest.raises(InvalidSchedule) as refusal:
        prove(ahead, problem)
    assert (
        "it would hang on a device where everything can block what comes next: 0RECV_B0 waits "
        "for 1SEND_B0 waits for 1B0 waits for 1F0 waits for 1RECV_F1 waits for 1RECV_F0 waits for "
        "0SEND_F0 waits for 0F0 waits for 0RECV_B0"
    ) in str(refusal.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_two_ends_of_a_message_are_in_one_order_everywhere(name: str) -> None:
    """Both ends of a message are in the same order everywhere: each rank sends and receives its
    messages in the order of one list of all messages."""
    placement = choose(name).place(4)
    made = build_program(
        choose(name), Problem(placement, 8, parse_costs("f=10,i=12,w=8,comm=1", placement))
    )
    graph = build_graph(made.schedule, device=Device.ONE_QUEUE)
    place = {graph.actions[node]: place for place, node in enumerate(graph.order)}
    for row in made.schedule.rows:
        sends = [
            partner_of(a, placement) if RULES[a.kind].lane is Lane.RECEIVE else a
            for a in row
            if RULES[a.kind].is_message
        ]
        assert [place[send] for send in sends] == sorted(place[send] for send in sends)


@PROPERTY
@given(seeds)
def test_any_order_of_passes_can_be_placed(seed: int) -> None:
    """Messages can be added to any order of passes, also to one read from a file, without a new
    deadlock."""
    case = random_case(seed)
    proved = prove(with_messages(case.schedule, case.problem), case.problem)
    assert run(proved.schedule, case.problem, held_up=True).ended_well


@pytest.mark.parametrize(
    ("name", "hop", "size"), in_pairs(FAMILIES, [0.0, 1.0, 3.0], [(2, 4), (4, 8), (6, 6)])
)
def test_nothing_is_lost_by_it(name: str, hop: float, size: tuple[int, int]) -> None:
    """Posting receives late costs no time. A receive is posted no later than its message is
    computed, so the step takes as long as if each rank posted all its receives at the beginning."""
    resolved = choose(name)
    ranks, microbatches = size
    placement = resolved.place(ranks)
    problem = Problem(placement, microbatches, uniform(placement, 10, 12, 8, hop))
    made = build_program(resolved, problem)
    passes = replace(made.schedule, rows=made.schedule.compute_rows)
    least = simulate_unproved(passes, problem).makespan
    assert simulate(made, problem.costs).makespan == pytest.approx(least, rel=1e-9)


def test_a_device_that_waits_takes_longer() -> None:
    """A step takes longer on a device whose passes wait for all messages posted before them, and
    longest on one with a single queue for passes and messages. One rank alone has no messages."""
    for ranks, differ in ((4, True), (1, False)):
        made = program("1f1b", line_problem(ranks, 8, 10, 12, 8, 1))
        usual, waiting, queue = (
            simulate(made, made.problem.costs, device).makespan for device in Device
        )
        assert (usual < waiting <= queue) if differ else (usual == waiting == queue)


# --- all pipelines of a job


@pytest.mark.parametrize("name", FAMILIES)
def test_two_pipelines_that_are_tied_at_every_pass_run_one_program(name: str) -> None:
    """Two pipelines that wait for each other at every pass run the same program without a hang.

    Passes contain the experts' all-to-all and the gathers of parameters, whose groups span several
    pipelines. So no rank ends a pass before its twin in the other pipeline has begun it, whatever
    delays either of them.
    """
    placement = choose(name).place(4)
    made = build_program(choose(name), Problem(placement, 8, uniform(placement, 10, 12, 8, 1)))
    assert not tied(made, made).cycle()


def test_two_pipelines_with_programs_of_their_own_could_hang() -> None:
    """Two pipelines with different programs could hang, although each program is sound alone.

    The rows of a program depend on its costs. This is why all ranks use the costs of global rank 0
    and compare digests over the world.
    """
    placement = choose("v-half").place(4)
    first, other = (
        build_program(choose("v-half"), Problem(placement, 8, parse_costs(costs, placement)))
        for costs in ("f=10,i=12,w=8,comm=1", "f=10,i=8,w=14,comm=3")
    )
    assert tied(first, other).cycle()


def tied(first: Program, other: Program) -> Graph:
    """Return the graph of two pipelines, whose n-th passes on a rank always end together. Each rank
    is blocked by everything that it posts."""
    graphs = [build_graph(made.schedule, device=Device.ONE_QUEUE) for made in (first, other)]
    offset, others = (len(graph.actions) for graph in graphs)
    before = [graphs[0].before[node] for node in range(offset)]
    before += [[n + offset for n in graphs[1].before[node]] for node in range(others)]
    passes = [
        [
            [
                node
                for node, action in enumerate(graph.actions)
                if is_compute(action) and graph.ranks[node] == rank
            ]
            for rank in range(4)
        ]
        for graph in graphs
    ]
    for mine, twins in zip(*passes, strict=True):
        for node, twin in zip(mine, twins, strict=True):
            # Both passes wait for whatever either of them waits for, so they end together.
            before[node] += [earlier + offset for earlier in graphs[1].before[twin]]
            before[twin + offset] += graphs[0].before[node]
    waits = [(node, earlier) for node, nodes in enumerate(before) for earlier in nodes]
    later, earlier = np.array(waits, dtype=np.int32).T
    return replace(
        graphs[0],
        actions=graphs[0].actions + graphs[1].actions,
        before=NodeLists.of(later, earlier, len(before)),
    )


# --- the result of each transform, with one action moved


def moved(made: Program, action: str, before: str) -> Schedule:
    """Return the schedule of ``made`` with ``action`` moved right before another action of its
    rank."""
    moves, stays = parse_action(action), parse_action(before)
    rows = []
    for row in made.schedule.rows:
        if moves in row:
            assert row.index(stays) < row.index(moves)
            rest = [other for other in row if other != moves]
            at = rest.index(stays)
            row = (*rest[:at], moves, *rest[at:])
        rows.append(row)
    return replace(made.schedule, rows=tuple(rows))


def family_program(
    name: str, ranks: int, microbatches: int, forward_only: bool = False, **options: Any
) -> Program:
    resolved = choose(name)
    placement = resolved.place(ranks)
    copies = [1.0] * placement.stages
    costs = uniform(placement, 2, 2, 2).with_host(copies, copies)
    return build_program(
        resolved,
        Problem(
            placement,
            microbatches,
            costs,
            forward_only=forward_only,
            options=ScheduleOptions(**options),
        ),
    )


ZB_V_DIVIDED = partial(family_program, "zb-v", 2, 4, vocab_parallel=VocabularyParallel.ONE)
SPOILT: dict[str, tuple[Callable[[], Program], str, str]] = {
    "order: a receive before passes that its message comes of": (
        partial(family_program, "zb-h1", 3, 4), "0RECV_B0", "0F1"
    ),
    "order: a receive before a receive that its message comes of": (
        partial(family_program, "zb-h1", 3, 4), "1RECV_F3", "1RECV_B0"
    ),
    "forward only": (
        partial(family_program, "interleaved", 2, 4, forward_only=True), "2RECV_F0", "0SEND_F0"
    ),
    "vocabulary: a broadcast before what it shares can be made": (ZB_V_DIVIDED, "1BCAST_S0", "1E0"),
    "vocabulary: two collectives in another order than on the other rank": (
        ZB_V_DIVIDED, "1REDUCE_E2", "1BCAST_E3"
    ),
    "vocabulary: a sum before a receive that another rank's part comes after": (
        ZB_V_DIVIDED, "1REDUCE_SI0", "1RECV_F3"
    ),
    "offload": (
        partial(family_program, "1f1b", 2, 6, activation_offload=Offload.FULL), "0RECV_B0", "0F1"
    ),
    "post-validation: a message of its own": (
        partial(family_program, "zb-2p", 2, 4, steps_overlap=True), "1RECV_P0", "1RECV_F0"
    ),
    "post-validation: a message beside them": (
        partial(family_program, "zb-2p", 2, 4, steps_overlap=True), "1RECV_F0", "1SEND_V0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_what_only_a_device_would_hang_at_is_refused(case: str) -> None:
    make, action, before = SPOILT[case]
    made = make()
    spoilt = moved(made, action, before)
    with pytest.raises(InvalidSchedule, match="hang on a device where everything can") as refusal:
        prove(spoilt, made.problem)
    assert action in str(refusal.value)


@pytest.mark.parametrize("make", [ZB_V_DIVIDED, partial(family_program, "interleaved", 3, 6)])
def test_a_wait_may_stand_anywhere_behind_what_it_waits_for(make: Callable[[], Program]) -> None:
    """A wait may come anywhere after the action that it waits for. No posted message needs anything
    later, so no wait can deadlock; the cases of `SPOILT` move no waits."""
    made = make()
    rows = []
    for row in made.schedule.rows:
        waits = {a for a in row if RULES[a.kind].lane is Lane.WAIT}
        after = {a._replace(kind=RULES[a.kind].needs[0].kinds[0]): a for a in waits}
        rows.append([b for a in row if a not in waits for b in (a, after.get(a)) if b is not None])
    assert prove(replace(made.schedule, rows=tuple(map(tuple, rows))), made.problem)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("vocabulary", [VocabularyParallel.ONE, VocabularyParallel.TWO])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_what_is_only_given_is_soon_waited_for(
    name: str, vocabulary: VocabularyParallel, forward_only: bool
) -> None:
    """A rank waits soon for a collective to which it only gives a tensor, however many microbatches
    there are. If it waited at the end of the step, it would keep every such tensor until then."""
    made = family_program(name, 3, 18, vocab_parallel=vocabulary, forward_only=forward_only)
    waits = {
        kind: RULES[kind].needs[0].kinds[0] for kind in (Kind.WAIT_S, Kind.WAIT_SI, Kind.WAIT_E)
    }
    seen = set()
    for row in made.schedule.rows:
        given = Counter[Kind]()
        for action in row:
            given[action.kind] += 1
            for wait, collective in waits.items():
                if any(a.kind is wait for a in row):
                    seen.add(wait)
                    assert given[collective] - given[wait] <= 8, action
    assert seen == {Kind.WAIT_E, Kind.WAIT_S if forward_only else Kind.WAIT_SI}


def test_copies_do_not_stand_behind_waits_for_sends() -> None:
    """Copies to and from the host are posted before the wait for a send. After it they would start
    late."""
    row = family_program("1f1b", 2, 6, activation_offload=Offload.FULL).schedule.rows[0]
    copies = [at for at, action in enumerate(row) if RULES[action.kind].lane in HOST_LANES]
    assert copies
    assert all(row[at - 1].kind not in (Kind.WAIT_F, Kind.WAIT_B) for at in copies)


# --- the memory of messages


def test_messages_count_where_the_limit_is_in_bytes() -> None:
    """Messages count against a memory limit in bytes: a received message until the pass that uses
    it has run, and a sent message from the pass that computes it until the wait for its send. They
    do not count against a limit in microbatches, which is the unit of the papers."""
    amount = {Held.ACTIVATION: 10.0, Held.WEIGHT_INPUTS: 4.0, Held.MESSAGE: 1.0}
    (row,) = rows_of(
        "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1RECV_B0 1WAIT_F0 1I0 1SEND_B0 1W0 1WAIT_B0"
    )
    held = list(held_during(row, lambda kind, stage: amount[kind]))
    assert held == [1, 2, 11, 12, 21, 22, 22, 20, 15, 15, 11]


def test_passes_leave_room_for_messages() -> None:
    """Passes leave memory for messages. With 500 bytes the schedule zb-auto holds five
    microbatches, and fewer if messages take some of these bytes."""
    resolved = choose("zb-auto")
    placement = resolved.place(4)
    held = {Held.ACTIVATION: (100.0,) * 4, Held.WEIGHT_INPUTS: (50.0,) * 4}
    costs = (
        uniform(placement, 10, 12, 8, 1).with_passes(held_bytes=held).with_links(message_bytes=20.0)
    )
    limit = MemoryLimit(bytes=500)
    made = build_program(resolved, Problem(placement, 8, costs, limit))
    free = costs.with_links(message_bytes=0.0)
    without = build_program(resolved, Problem(placement, 8, free, limit))
    assert max(peaks(made.schedule, in_bytes(costs))) <= 500
    assert max(peaks(without.schedule, in_bytes(costs))) > 500
    with pytest.raises(InvalidSchedule, match="least feasible limit"):
        build_program(resolved, Problem(placement, 8, costs, MemoryLimit(bytes=110)))
