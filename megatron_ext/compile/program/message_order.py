"""One sequence of the actions of all ranks; each rank's row is its part of the sequence.

A device may block its host, and all its streams, behind anything that has been posted: a receive
whose message is not made yet, a collective that another rank has not reached. So everything that a
rank has posted must be able to end without anything that the rank does later. This holds if there
is one order of all passes and messages in which each needs only earlier ones, and every rank
follows it. The order here is that of time in a simulation (`order_messages`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_ext.compile.program.graph import Graph, build_graph, channel_of
from megatron_ext.compile.program.pairs import seconds_in_pairs
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.action_arrays import (
    IS_COLLECTIVE,
    IS_PASS,
    IS_RECEIVE,
    IS_SEND,
    KINDS,
    ActionArrays,
    Ints,
)
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.problem import P2P, Problem
from megatron_ext.schedule.schedule import Schedule, is_compute

_TICKS = 10**6  # number of ticks of the longest pass

# Least assumed seconds of a message, as a share of the longest pass. A message that costs nothing
# in the plan takes some time in fact, so a pass that depends on a message should not come before
# other passes without need.
_LEAST_P2P_SHARE = 1 / 32

# The position of each kind of action in alphabetical order.
_BY_NAME = np.argsort(np.argsort(KINDS))

# Sort keys of the actions: time, class of the action at equal times, and position within its class.
_Keys = tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]


def order_messages(schedule: Schedule, problem: Problem) -> Schedule:
    """Return a schedule with messages, reordered so that all ranks follow one global sequence.

    The order is that of time, in a simulation in which no send waits for its receive to be posted:

    - a pass comes at its end;
    - a message, at both its ends, comes when the pass directly before its send ends;
    - a collective, on all ranks, comes when all ranks could begin it.

    Times are whole ticks, and every pass takes at least one. Times therefore rise along every
    dependency, and equal times are exactly equal. Actions of one time have the same order
    everywhere: passes, then messages by their sends, then collectives. A receive is posted no later
    than its message is made, so no time is lost.

    A schedule with a cyclic wait is returned unchanged, so that `prove` shows the cycle.
    """
    graph, arrays = build_graph(schedule), schedule.arrays
    if len(graph.order) < len(graph.actions):
        return schedule
    keys = _batched if problem.options.p2p is P2P.BATCHED else _in_sequence
    times, firsts, places = keys(graph, schedule, problem.costs)
    ordered = [graph.actions[n] for n in np.lexsort((places, firsts, times, arrays.rank)).tolist()]
    bounds = pairwise(accumulate(map(len, schedule.rows), initial=0))
    return replace(schedule, rows=tuple(tuple(ordered[start:end]) for start, end in bounds))


def _in_sequence(graph: Graph, schedule: Schedule, costs: Costs) -> _Keys:
    """Return the sort keys of all actions that give the global sequence of passes and messages.

    The two ends of a message share a key, and so do all calls of a collective.
    """
    arrays = schedule.arrays
    starts, ends = _times(graph, schedule, costs, _LEAST_P2P_SHARE)
    kind, nodes = arrays.kind, arrays.numbers
    is_collective, is_message = IS_COLLECTIVE[kind], IS_SEND[kind] | IS_RECEIVE[kind]
    send = np.where(IS_RECEIVE[kind], graph.partners, nodes)
    place = np.empty_like(nodes)
    place[graph.order] = nodes
    return (
        np.select(
            [is_message, is_collective], [_made(arrays, ends)[send], starts[graph.leaders]], ends
        ),
        np.select([is_message, is_collective], [1, 2], 0),
        np.select([is_message, is_collective], [send, place[graph.leaders]], nodes),
    )


def _batched(graph: Graph, schedule: Schedule, costs: Costs) -> _Keys:
    """Return the sort keys of all actions if messages share one communicator and move in batches.

    Two neighbours that send to each other at one time must swap in one batch. A rank receives the
    messages of a time after its own passes that end by then, right before it sends its own messages
    of that time. Two overlapped passes send both ways; the rank exchanges with one neighbour after
    the other.
    """
    arrays, paired = schedule.arrays, schedule.paired
    _, ends = _times(graph, schedule, costs, least_share=0.0)
    kind = arrays.kind
    send = np.where(IS_RECEIVE[kind], graph.partners, arrays.numbers)
    by_name = np.lexsort((arrays.microbatch, _BY_NAME[kind], arrays.stage))
    place = np.empty_like(by_name)
    place[by_name] = 2 * arrays.numbers
    place[paired + 1] = place[paired] + 1
    turn = np.select([IS_PASS[kind], IS_RECEIVE[kind]], [0, 1], 2)
    if len(paired):
        turn = np.where(IS_PASS[kind], 0, turn + 2 * _links(schedule))
    return _made(arrays, ends)[send], turn, place


def _links(schedule: Schedule) -> Ints:
    """Return for each message the number of its link between two ranks; 0 for other actions.

    A link is a pair of ranks of which one sends activations to the other. Two overlapped passes
    send both ways at the same time, and each send swaps with a message in the other direction. All
    ranks take their links in one order; otherwise they would wait for one another.
    """
    arrays, placement = schedule.arrays, schedule.placement
    links = []
    for stage, kind in arrays.stage_kinds:
        if not RULES[kind].is_message:
            links.append(0)
            continue
        sender, receiver, send = channel_of(Action(stage, kind, 0), placement)
        low, high = sorted((sender, receiver))
        is_downwards = (sender == low) is (send is Kind.SEND_F)
        links.append(2 * (low * placement.ranks + high) + is_downwards)
    return np.array(links, dtype=np.int32)[arrays.stage_kind]


def _times(
    graph: Graph, schedule: Schedule, costs: Costs, least_share: float
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """Return the start and the end of each action, in ticks; two overlapped passes end together.

    ``least_share`` is the least time of a message, as a share of the longest pass.
    """
    arrays, paired = schedule.arrays, schedule.paired
    actions = chain.from_iterable(arrays.examples)
    longest = max(costs.alike.of(action) for action in actions if is_compute(action))
    least = longest * least_share
    p2p_seconds = tuple(max(seconds, least) for seconds in costs.links.p2p_seconds_by_stage)
    costs = costs.with_links(
        p2p_seconds=max(costs.links.p2p_seconds, least), p2p_seconds_by_stage=p2p_seconds
    )
    # An evaluation's passes may all cost nothing, and a tick must not be zero.
    tick = longest / _TICKS or 1.0
    ticks = arrays.of_each(
        lambda a: max(round(costs.of(a) / tick), int(is_compute(a))), bool(costs.at_places)
    )
    for node in arrays.numbers[graph.leaders != arrays.numbers].tolist():
        ticks[node] = 0
    for node, first, second in seconds_in_pairs(schedule, costs):
        ticks[node] = max(round(first / tick), 1)
        ticks[node + 1] = max(round((first + second) / tick) - ticks[node], 1)
    starts, ends = map(np.array, graph.longest_paths(ticks))
    ends[paired] = ends[paired + 1]
    return starts, ends


def _made(arrays: ActionArrays, ends: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return, for each action, the end of the latest pass on its rank up to that action."""
    latest = arrays.latest(IS_PASS[arrays.kind])
    return np.where(latest < 0, 0, ends[latest])
