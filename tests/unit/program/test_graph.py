"""Tests of the graph of actions that wait for one another, compared with a second computation of
what a program derives from the graph."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings

from megatron_ext.compile.program.graph import (
    Device,
    Graph,
    build_graph,
    channel_of,
    needed_numbers,
)
from megatron_ext.compile.program.verify import prove
from megatron_ext.compile.program.waits import await_sends
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.action_arrays import KINDS
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.problem import P2P, Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule, is_compute
from tests.helpers.random_schedules import PROPERTY, Case, random_case, seeds
from tests.helpers.schedules import line_problem, program, rows_of, with_messages, without_waits


def test_columns_say_what_the_actions_do() -> None:
    (row, other) = rows_of("0F0 0SEND_F0 0F1\n1RECV_F0 1F0")
    arrays = Schedule("written", line_problem(2, 2).placement, (row, other)).arrays
    entries = zip(arrays.stage, arrays.kind, arrays.microbatch, strict=True)
    assert tuple(Action(int(s), KINDS[k], int(m)) for s, k, m in entries) == row + other
    assert arrays.rank.tolist() == [0, 0, 0, 1, 1]
    assert arrays.first.tolist() == [0, 0, 0, 3, 3]
    assert arrays.latest(arrays.numbers % 2 == 1).tolist() == [-1, 1, 1, 3, 3]
    assert len(Schedule("empty", line_problem(2, 1).placement, ((), ())).arrays) == 0


def test_what_is_needed_is_found_by_its_number() -> None:
    made = program("1f1b", line_problem(2, 2)).schedule
    actions = [action for row in made.rows for action in row]
    found = defaultdict(set)
    for numbers in needed_numbers(made.arrays, made.placement):
        for action, number in zip(actions, numbers.tolist(), strict=True):
            if number >= 0:
                found[str(action)].add(str(actions[number]))
    assert found["1F1"] == {"1RECV_F1"}
    assert found["0B1"] == {"0F1", "0RECV_B1"}
    assert found["0WAIT_F1"] == {"0SEND_F1"}
    assert "0F1" not in found


@settings(PROPERTY, max_examples=50)
@given(seeds)
def test_the_order_of_the_proof_is_one_on_every_device(seed: int) -> None:
    case, problem = async_case(seed)
    proved = prove(with_messages(case.schedule, problem), problem)
    assert proved.known_order is not None
    place = {node: at for at, node in enumerate(proved.known_order.tolist())}
    for device in Device:
        graph = build_graph(proved.schedule, device=device)
        assert len(graph.order) == len(place) == len(graph.actions)
        assert all(place[e] < place[n] for n in place for e in graph.before[n])


@settings(PROPERTY, max_examples=50)
@given(seeds)
def test_waits_stand_where_other_actions_show_that_the_message_has_ended(seed: int) -> None:
    case, problem = async_case(seed)
    schedule = without_waits(case.schedule, problem)
    assert waited_for(await_sends(schedule, problem)) == as_soon_as_known(schedule)


@pytest.mark.parametrize("vocabulary", [VocabularyParallel.ONE, VocabularyParallel.TWO])
@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "interleaved"])
def test_waits_for_collectives_stand_as_early(name: str, vocabulary: VocabularyParallel) -> None:
    placement = choose(name).place(3)
    options = ScheduleOptions(vocab_parallel=vocabulary)
    made = program(name, Problem(placement, 6, uniform(placement, 10, 12, 8, 1), options=options))
    rows = (tuple(a for a in r if RULES[a.kind].lane is not Lane.WAIT) for r in made.schedule.rows)
    without = Schedule(name, placement, tuple(rows))
    assert waited_for(made.schedule) == as_soon_as_known(without)


def async_case(seed: int) -> tuple[Case, Problem]:
    case = random_case(seed)
    return case, case.problem.with_options(p2p=P2P.ASYNC)


def waited_for(schedule: Schedule) -> dict[Action, Action | None]:
    """Return, for each wait, the next pass of its rank."""
    found: dict[Action, Action | None] = {}
    for row in schedule.rows:
        after = None
        for action in reversed(row):
            if RULES[action.kind].lane is Lane.WAIT:
                found[action] = after
            elif is_compute(action):
                after = action
    return found


def as_soon_as_known(schedule: Schedule) -> dict[Action, Action | None]:
    """Return, for each wait, the next pass of its rank, computed from the set of all actions that
    must have ended before each action starts."""
    graph = build_graph(schedule)
    ended = _must_have_ended(graph)
    users = _users(graph)
    waits = {RULES[kind].needs[0].kinds[0]: kind for kind in Kind if RULES[kind].lane is Lane.WAIT}
    found: dict[Action, Action | None] = {}
    for rank in range(schedule.placement.ranks):
        own = [node for node, other in enumerate(graph.ranks.tolist()) if other == rank]
        used_here = {key for key, nodes in users.items() for n in nodes if graph.ranks[n] == rank}
        pending: dict[object, deque[int]] = defaultdict(deque)
        for node in own:
            action = graph.actions[node]
            if is_compute(action):
                for sends in pending.values():
                    # A pass that knows that one send has ended also knows that the earlier sends on
                    # the same channel have ended.
                    while any(ended[node] & users[_key(graph, send)] for send in sends):
                        given = graph.actions[sends.popleft()]
                        found[given._replace(kind=waits[given.kind])] = action
            if RULES[action.kind].lane is Lane.SEND:
                pending[channel_of(action, schedule.placement)].append(node)
            elif action.kind in waits and not any(kind is action.kind for _, kind, _ in used_here):
                pending[action.kind].append(node)
        for sends in pending.values():
            found |= {(a := graph.actions[n])._replace(kind=waits[a.kind]): None for n in sends}
    return found


def _must_have_ended(graph: Graph) -> list[set[int]]:
    ended: list[set[int]] = [set() for _ in graph.actions]
    for node in graph.order.tolist():
        ended[node] = set(graph.before[node]).union(*(ended[e] for e in graph.before[node]))
    return ended


def _key(graph: Graph, given: int) -> tuple[int, Kind, int]:
    """Return a key that both ends of a message share: the action of its receive. For a collective,
    the key is its kind and its microbatch."""
    action = graph.actions[given]
    if RULES[action.kind].lane is Lane.COLLECTIVE:
        return -1, action.kind, action.microbatch
    return graph.actions[graph.partners[given]]


def _users(graph: Graph) -> dict[tuple[int, Kind, int], set[int]]:
    """Return, for each message or collective, the passes that need it."""
    users: dict[tuple[int, Kind, int], set[int]] = defaultdict(set)
    for node, action in enumerate(graph.actions):
        if is_compute(action):
            for earlier in graph.before[node]:
                other = graph.actions[earlier]
                if RULES[other.kind].lane is Lane.RECEIVE:
                    users[other].add(node)
                elif RULES[other.kind].lane is Lane.COLLECTIVE:
                    users[-1, other.kind, other.microbatch].add(node)
    return users
