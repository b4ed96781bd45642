"""Insert the waits for what a rank gives away, where they cost nothing.

A tensor on its way must not be freed or changed, and someone must wait for its send before it is;
so it is with what a rank gives to a collective and uses nothing of. A wait holds its rank up until
the other side has received, so it is put before the first action that could not run if that had not
happened: where the rank already knows, by what it has itself received since, that the message was
used. Vector clocks tell (Fidge 1988): for each action, how far every other rank must have come
before it can start.

Sends of which a rank never hears again (those of the cool-down, and all of an evaluation) are
waited for at the end. In an evaluation the oldest is waited for sooner, once more than
``SENDS_BEHIND`` are under way on its channel: before a pass that comes after the send in one order
of all actions of all ranks. As every wait keeps to that order, no two can wait for each other.

Batched, a send has gone when its batch has, and a rank knows that once it has used what it received
in that batch or a later one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.problem import P2P, Problem
from megatron_ext.schedule.program.graph import (
    Channel,
    Graph,
    build_graph,
    channel_of,
    has_place,
)
from megatron_ext.schedule.schedule import Schedule, is_compute

SENDS_BEHIND = 4

_WAIT_FOR: dict[Kind, Kind] = {
    need.kinds[0]: wait
    for wait, rule in RULES.items()
    if rule.lane is Lane.WAIT
    for need in rule.needs
}


def await_sends(schedule: Schedule, problem: Problem) -> Schedule:
    """``schedule``, which has its messages, with a wait for each send, and for what is only given
    to a collective."""
    graph = build_graph(schedule, problem.extras.p2p)
    number = {action: node for node, action in enumerate(graph.actions)}
    has_gone = _known_by_batches if problem.extras.p2p is P2P.BATCHED else _known_by_clocks
    knows_of = has_gone(graph)
    in_step = _in_step(graph) if problem.forward_only else []
    place = {node: place for place, node in enumerate(in_step)}

    def can_be_waited_for(sends: deque[Action], node: int) -> bool:
        send = number[sends[0]]
        if knows_of(node, send):
            return True
        if not problem.forward_only or len(sends) <= SENDS_BEHIND or node not in place:
            return False
        moves = graph.batches.get(send, (send,))
        return all(n in place and place[n] < place[node] for n in moves)

    rows, start = [], 0
    for row in schedule.rows:
        pending: dict[Channel | Kind, deque[Action]] = defaultdict(deque)
        new_row: list[Action] = []
        for node, action in enumerate(row, start=start):
            if is_compute(action):
                for sends in pending.values():
                    while sends and can_be_waited_for(sends, node):
                        new_row.append(_wait(sends.popleft()))
            new_row.append(action)
            if RULES[action.kind].lane is Lane.SEND:
                pending[channel_of(action, schedule.placement)].append(action)
            elif action.kind in _WAIT_FOR and _is_given(action, problem):
                pending[action.kind].append(action)
        new_row += [_wait(send) for sends in pending.values() for send in sends]
        rows.append(tuple(new_row))
        start += len(row)
    return replace(schedule, rows=tuple(rows))


def _in_step(graph: Graph) -> list[int]:
    """The nodes, each after all it waits for, as they would run if every pass took one unit."""
    begins, _ = graph.longest_paths([float(is_compute(action)) for action in graph.actions])
    return sorted(graph.order, key=begins.__getitem__)


def _is_given(action: Action, problem: Problem) -> bool:
    """Whether ``action`` is a collective of which its rank uses nothing."""
    if RULES[action.kind].lane is not Lane.COLLECTIVE:
        return False
    return has_place(_WAIT_FOR[action.kind], action.stage, problem.placement, problem.forward_only)


def _wait(send: Action) -> Action:
    return Action(send.stage, _WAIT_FOR[send.kind], send.microbatch)


def _known_by_clocks(graph: Graph) -> Callable[[int, int], bool]:
    """Whether, at a compute node, its rank knows that a send's node, or that of a collective of
    which it uses nothing, has ended: async messages."""
    clocks, users = _clocks(graph), _users(graph)

    def knows_of(node: int, given: int) -> bool:
        action = graph.actions[given]
        if RULES[action.kind].is_message:
            used_by = users[graph.actions[graph.partners[given]]]
        else:
            used_by = users[action._replace(stage=_ALL_RANKS)]
        return any(user <= clocks[node, graph.ranks[user]] for user in used_by)

    return knows_of


def _known_by_batches(graph: Graph) -> Callable[[int, int], bool]:
    """The same for batched messages: a later one of its rank, or one beside it, has been used."""
    used: dict[int, int] = {}  # by compute node, the last message that is there by then
    last = -1  # may be another rank's, whose nodes are below all of this one's
    for node, action in enumerate(graph.actions):
        if is_compute(action):
            last = max([last, *filter(graph.batches.__contains__, graph.before[node])])
            used[node] = last
    return lambda node, send: used[node] >= send


def _clocks(graph: Graph) -> NDArray[np.int32]:
    """Entry (n, r): the last compute node of rank r that must have ended before node n can."""
    clocks = np.full((len(graph.actions), graph.ranks[-1] + 1), -1, dtype=np.int32)
    for node in graph.order:
        clock = clocks[node]
        for earlier in graph.before[node]:
            np.maximum(clock, clocks[earlier], out=clock)
        if is_compute(graph.actions[node]):
            clock[graph.ranks[node]] = node
    return clocks


_ALL_RANKS = -1  # in the place of a stage: a collective, wherever it is


def _users(graph: Graph) -> dict[Action, list[int]]:
    """For each receive, and each collective as one of `_ALL_RANKS`, the compute nodes that need
    it."""
    users: dict[Action, list[int]] = defaultdict(list)
    for node, earlier_nodes in enumerate(graph.before):
        if is_compute(graph.actions[node]):
            for earlier in earlier_nodes:
                action = graph.actions[earlier]
                lane = RULES[action.kind].lane
                if lane is Lane.RECEIVE:
                    users[action].append(node)
                elif lane is Lane.COLLECTIVE:
                    users[action._replace(stage=_ALL_RANKS)].append(node)
    return users
