"""Insertion of waits for sends, at positions where they cost no time.

A tensor that is being sent must not be freed or changed, so its send must be waited for first. The
same holds for a rank's input to a collective whose result it does not use. A wait blocks its rank
until the other side has received. A wait is therefore put before the first action that could not
run before that anyway: where the rank already knows, from messages that it has received since, that
its message was used. Vector clocks tell this (Fidge 1988).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_ext.compile.program.graph import (
    Channel,
    Graph,
    blocking_actions,
    build_graph,
    channel_of,
    has_place,
)
from megatron_ext.compile.program.node_lists import NodeLists
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.action_arrays import (
    IS_BLOCKING,
    IS_COLLECTIVE,
    IS_PASS,
    IS_RECEIVE,
    Ints,
)
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.problem import P2P, Problem
from megatron_ext.schedule.schedule import Schedule, is_compute

SENDS_BEHIND = 4

_WAIT_FOR: dict[Kind, Kind] = {
    need.kinds[0]: wait
    for wait, rule in RULES.items()
    if rule.lane is Lane.WAIT
    for need in rule.needs
}


def await_sends(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule``, which has its messages, with a wait for each send.

    Inputs to collectives whose result the rank does not use are waited for too.

    Sends whose use a rank never learns of (those of the cool-down, and all of an evaluation) are
    waited for at the end. In an evaluation the oldest send is waited for sooner, once more than
    ``SENDS_BEHIND`` are under way on its channel: before a pass that comes after the send in one
    order of all actions of all ranks. As every wait follows that order, no two can wait for each
    other.
    """
    graph, arrays = build_graph(schedule, problem.options.p2p), schedule.arrays
    channels = [_channel(Action(stage, kind, 0), problem) for stage, kind in arrays.stage_kinds]
    is_given = np.array([channel is not None for channel in channels], dtype=bool)[
        arrays.stage_kind
    ]
    has_gone = _known_by_batches if problem.options.p2p is P2P.BATCHED else _known_by_clocks
    given = arrays.numbers[is_given]
    known_at: list[int] = has_gone(schedule, graph, given).tolist()
    _in_order(
        known_at, [(node, channels[arrays.stage_kind[node]], arrays.rank[node]) for node in given]
    )
    in_step = _in_step(graph, schedule) if problem.forward_only else []
    place = {node: place for place, node in enumerate(in_step)}

    def can_be_waited_for(sends: deque[int], node: int) -> bool:
        if known_at[sends[0]] <= node:
            return True
        if not problem.forward_only or len(sends) <= SENDS_BEHIND or node not in place:
            return False
        moves = graph.batches.get(sends[0], (sends[0],))
        return all(n in place and place[n] < place[node] for n in moves)

    rows, stage_kinds = [], iter(arrays.stage_kind.tolist())
    second_of_two = set((schedule.paired + 1).tolist())
    node = -1
    for row in schedule.rows:
        pending: dict[Channel | Kind, deque[int]] = defaultdict(deque)
        new_row: list[Action] = []
        for action in row:
            node += 1
            if is_compute(action) and node not in second_of_two:
                for sends in pending.values():
                    while sends and can_be_waited_for(sends, node):
                        new_row.append(wait_of(graph.actions[sends.popleft()]))
            new_row.append(action)
            channel = channels[next(stage_kinds)]
            if channel is not None:
                pending[channel].append(node)
        new_row += [wait_of(graph.actions[send]) for sends in pending.values() for send in sends]
        rows.append(tuple(new_row))
    return replace(schedule, rows=tuple(rows))


def _channel(action: Action, problem: Problem) -> Channel | Kind | None:
    """Return the channel on which ``action`` gives a tensor away: a send, or part of a collective.

    Each kind of collective whose result the rank does not use has a channel of its own. None for
    other actions.
    """
    lane = RULES[action.kind].lane
    if lane is Lane.SEND:
        return channel_of(action, problem.placement)
    if lane is not Lane.COLLECTIVE or action.kind not in _WAIT_FOR:
        return None
    wait = _WAIT_FOR[action.kind]
    is_given = has_place(wait, action.stage, problem.placement, problem.forward_only)
    return action.kind if is_given else None


def _in_order(known_at: list[int], given: Sequence[tuple[int, Channel | Kind | None, int]]) -> None:
    """Lower the entries of ``known_at``, the action at which a rank knows that a send is complete.

    A rank that knows of a send knows of those before it on the same channel, as messages of one
    channel complete in order. Otherwise an output could be waited for after the gradient that
    follows from it has come.
    """
    latest: dict[tuple[Channel | Kind | None, int], int] = {}
    for node, channel, rank in reversed(given):
        key = channel, int(rank)
        known_at[node] = latest[key] = min(known_at[node], latest.get(key, known_at[node]))


def _in_step(graph: Graph, schedule: Schedule) -> list[int]:
    """Return all actions in an order with each after all it waits for, if each pass took one
    unit."""
    is_pass = IS_PASS[schedule.arrays.kind]
    begins, _ = graph.longest_paths(is_pass.astype(float).tolist())
    return sorted(graph.order.tolist(), key=begins.__getitem__)


def wait_of(send: Action) -> Action:
    """Return the action that waits for the end of the send (or collective) ``send``."""
    return Action(send.stage, _WAIT_FOR[send.kind], send.microbatch)


def _known_by_batches(schedule: Schedule, graph: Graph, given: Ints) -> Ints:
    """Return for each of the sends ``given`` the first pass at which its rank knows it is complete.

    The result is the number of nodes if the rank never knows. This is for batched messages: a send
    has completed when its batch has. A rank knows that once it has used a message that it received
    in that batch or a later one.
    """
    arrays = schedule.arrays
    batched = np.zeros(len(arrays), dtype=bool)
    batched[list(graph.batches)] = True
    is_used = IS_PASS[arrays.kind[graph.before.owners]] & batched[graph.before.nodes]
    used = np.full(len(arrays), -1, dtype=np.int32)
    np.maximum.at(used, graph.before.owners[is_used], graph.before.nodes[is_used])
    # The running maximum stays within a rank, since nodes of earlier ranks have lower numbers.
    used = np.maximum.accumulate(used)
    passes = arrays.numbers[IS_PASS[arrays.kind]]
    known_at = np.full(len(arrays), len(arrays), dtype=np.int32)
    known_at[given] = _first(used[passes], given, passes, len(arrays))
    return known_at


def _known_by_clocks(schedule: Schedule, graph: Graph, given: Ints) -> Ints:
    """Return for each of the sends ``given`` the first pass at which its rank knows it is complete.

    This is for async messages: the send has completed if a pass that needs the message has ended.
    """
    arrays = schedule.arrays
    given, users = _users(schedule, graph, given)
    ranks, user_ranks = arrays.rank[given], arrays.rank[users]
    others = [np.unique(user_ranks[ranks == rank]) for rank in range(len(schedule.rows))]
    known_at = np.full(len(arrays), len(arrays), dtype=np.int32)
    for rank, (passes, clocks) in enumerate(_clocks(schedule, graph, others)):
        for place, other in enumerate(others[rank]):
            of_both = (ranks == rank) & (user_ranks == other)
            at = _first(clocks[:, place], users[of_both], passes, len(arrays))
            np.minimum.at(known_at, given[of_both], at)
    return known_at


def _first(rising: Ints, wanted: Ints, nodes: Ints, never: int) -> Ints:
    """Return, for each of ``wanted``, the first of ``nodes`` where ``rising`` is at least as large.

    The result is ``never`` if there is none. ``rising`` is sorted.
    """
    return np.append(nodes, np.int32(never))[np.searchsorted(rising, wanted)]


def _users(schedule: Schedule, graph: Graph, given: Ints) -> tuple[Ints, Ints]:
    """Return sends of ``given``, and at the same positions the passes that need their messages."""
    arrays, before = schedule.arrays, graph.before
    kind = arrays.kind[before.nodes]
    is_use = IS_PASS[arrays.kind[before.owners]] & (IS_RECEIVE[kind] | IS_COLLECTIVE[kind])
    users, used = before.owners[is_use], graph.leaders[before.nodes[is_use]]
    users_of = NodeLists.of(used, users, len(arrays))
    received = np.where(graph.partners < 0, graph.leaders, graph.partners)[given]
    return users_of.joined(given, received)


def _clocks(schedule: Schedule, graph: Graph, others: list[Ints]) -> list[tuple[Ints, Ints]]:
    """Return for each rank its passes that learn about other ranks, with their vector clocks.

    A rank has a clock with one entry per rank: the last pass of that rank that must have ended by
    now. The entries returned are those for the ranks in ``others``. An action that needs a message
    learns what its sender knew before the send, and one that needs a collective what all ranks
    knew. The order of a channel gives no further knowledge. Passes that can never start are not
    included.
    """
    arrays, nodes = schedule.arrays, schedule.arrays.numbers
    kind = arrays.kind
    is_blocking, is_collective = IS_BLOCKING[kind], IS_COLLECTIVE[kind]
    sends = np.where(IS_RECEIVE[kind], graph.partners, nodes)
    before_sends = blocking_actions(arrays)[sends]
    tells = np.where(is_blocking, nodes, np.where(is_collective, graph.leaders, before_sends))
    hears = is_blocking | (is_collective & (graph.leaders == nodes))

    owners, told = graph.before.owners, tells[graph.before.nodes]
    is_news = hears[owners] & (told >= 0)
    is_news &= ~(
        is_blocking[owners] & is_blocking[told] & (arrays.rank[owners] == arrays.rank[told])
    )
    lists = NodeLists.of(owners[is_news], told[is_news], len(arrays))
    bounds, heard = lists.bounds.tolist(), lists.nodes.tolist()
    uses: list[int] = np.bincount(lists.nodes, minlength=len(arrays)).tolist()
    ranks, is_pass, holds = arrays.rank.tolist(), IS_PASS[kind].tolist(), is_blocking.tolist()

    clocks = list(np.full((len(others), len(others)), -1, dtype=np.int32))
    left: dict[int, Ints] = {}  # vector clocks that later actions still have to read
    known: list[tuple[list[int], list[Ints]]] = [([], []) for _ in others]
    for node in graph.order[hears[graph.order]].tolist():
        rank = ranks[node]
        clock = clocks[rank] if holds[node] else np.full(len(others), -1, dtype=np.int32)
        news = heard[bounds[node] : bounds[node + 1]]
        for earlier in news:
            np.maximum(clock, left[earlier], out=clock)
            uses[earlier] -= 1
            if not uses[earlier]:
                del left[earlier]
        if is_pass[node]:
            clock[rank] = node
            if news:
                known[rank][0].append(node)
                known[rank][1].append(clock[others[rank]])
        if uses[node]:
            left[node] = clock.copy()
    return [
        (
            np.array(passes, dtype=np.int32),
            np.array(entries, dtype=np.int32).reshape(len(passes), len(others[rank])),
        )
        for rank, (passes, entries) in enumerate(known)
    ]
