"""Put the actions of all ranks in one sequence, of which each rank's row is its part.

A device may stop its host, and all its streams, behind anything that has been posted: a receive
whose message is not made yet, a collective that another rank has not reached. So all that a rank
has posted must be able to end without anything it does later. It is, if there is one order of all
passes and messages in which each needs only what comes before it, and every rank keeps to that.

The order is that of time, in a simulation in which a receive is never waited for to be posted:

- a pass comes when it ends;
- a message, at both its ends, when the pass directly before its send ends;
- a collective, on all ranks, when all could begin it.

Times are whole ticks, and no pass takes none: they rise along every dependency, and what ends
together does so exactly. What comes at one time is in one order everywhere: passes, then messages
by their sends, then collectives. A receive is posted no later than its message is made, so nothing
is lost by it.

Batched, messages share one communicator, and two neighbours that send to each other at one time
must swap in one batch: a rank receives what is made at a time after its own passes that end by
then, right before it sends what it has made at that time itself. A pair of passes sends both ways:
then so it is with each neighbour, one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_ext.compile.program.graph import Graph, build_graph, channel_of
from megatron_ext.compile.program.pairs import seconds_in_pairs
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.columns import (
    IS_COLLECTIVE,
    IS_PASS,
    IS_RECEIVE,
    IS_SEND,
    KINDS,
    Columns,
    Ints,
)
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.problem import P2P, Problem
from megatron_ext.schedule.schedule import Schedule, is_compute

_TICKS = 10**6  # of the longest pass

# Of the longest pass, what a hop takes at the least: messages that cost nothing in the plan take
# some time in truth, and a pass that depends on one should not come before others for nothing.
_LEAST_HOP = 1 / 32

_BY_NAME = np.argsort(np.argsort(KINDS))  # the place of each kind among their names

# By node: a time, what comes first at that time, and a place among those.
_Keys = tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]


def order_messages(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule``, which has its messages, in one sequence.

    One whose passes wait for one another is left as it is, for `prove` to show how.
    """
    graph, columns = build_graph(schedule), schedule.columns
    if len(graph.order) < len(graph.actions):
        return schedule
    keys = _batched if problem.extras.p2p is P2P.BATCHED else _in_sequence
    times, firsts, places = keys(graph, schedule, problem.costs)
    ordered = [graph.actions[n] for n in np.lexsort((places, firsts, times, columns.rank)).tolist()]
    bounds = pairwise(accumulate(map(len, schedule.rows), initial=0))
    return replace(schedule, rows=tuple(tuple(ordered[start:end]) for start, end in bounds))


def _in_sequence(graph: Graph, schedule: Schedule, costs: Costs) -> _Keys:
    """The keys by which nodes are in sequence: the two ends of a message share theirs, and so do a
    collective's."""
    columns = schedule.columns
    starts, ends = _times(graph, schedule, costs, _LEAST_HOP)
    kind, nodes = columns.kind, columns.numbers
    is_collective, is_message = IS_COLLECTIVE[kind], IS_SEND[kind] | IS_RECEIVE[kind]
    send = np.where(IS_RECEIVE[kind], graph.partners, nodes)
    place = np.empty_like(nodes)
    place[graph.order] = nodes
    return (
        np.select(
            [is_message, is_collective], [_made(columns, ends)[send], starts[graph.leaders]], ends
        ),
        np.select([is_message, is_collective], [1, 2], 0),
        np.select([is_message, is_collective], [send, place[graph.leaders]], nodes),
    )


def _batched(graph: Graph, schedule: Schedule, costs: Costs) -> _Keys:
    """The same where messages share one communicator."""
    columns, paired = schedule.columns, schedule.paired
    _, ends = _times(graph, schedule, costs, least_hop=0.0)
    kind = columns.kind
    send = np.where(IS_RECEIVE[kind], graph.partners, columns.numbers)
    by_name = np.lexsort((columns.microbatch, _BY_NAME[kind], columns.stage))
    place = np.empty_like(by_name)
    place[by_name] = 2 * columns.numbers
    place[paired + 1] = place[paired] + 1
    turn = np.select([IS_PASS[kind], IS_RECEIVE[kind]], [0, 1], 2)
    if len(paired):
        turn = np.where(IS_PASS[kind], 0, turn + 2 * _links(schedule))
    return _made(columns, ends)[send], turn, place


def _links(schedule: Schedule) -> Ints:
    """For each message, the number of its link: of two ranks, of which one sends activations to the
    other. 0 for what is no message.

    A pair sends both ways at once, and each send swaps with what comes the other way. All ranks
    take their links in one order, or they would wait for one another.
    """
    columns, placement = schedule.columns, schedule.placement
    links = []
    for stage, kind in columns.pairs:
        if not RULES[kind].is_message:
            links.append(0)
            continue
        sender, receiver, send = channel_of(Action(stage, kind, 0), placement)
        low, high = sorted((sender, receiver))
        is_downwards = (sender == low) is (send is Kind.SEND_F)
        links.append(2 * (low * placement.ranks + high) + is_downwards)
    return np.array(links, dtype=np.int32)[columns.pair]


def _times(
    graph: Graph, schedule: Schedule, costs: Costs, least_hop: float
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """When each node starts and ends, in ticks; the two of a pair end together. ``least_hop`` is a
    share of the longest pass of a mean microbatch."""
    columns, paired = schedule.columns, schedule.paired
    actions = chain.from_iterable(columns.examples)
    longest = max(costs.alike.of(action) for action in actions if is_compute(action))
    least = longest * least_hop
    hops = tuple(max(hop, least) for hop in costs.links.hops)
    costs = costs.with_links(hop=max(costs.links.hop, least), hops=hops)
    tick = longest / _TICKS or 1.0  # an evaluation's passes may cost nothing
    ticks = columns.of_each(
        lambda a: max(round(costs.of(a) / tick), int(is_compute(a))), bool(costs.at_places)
    )
    for node in columns.numbers[graph.leaders != columns.numbers].tolist():
        ticks[node] = 0
    for node, first, second in seconds_in_pairs(schedule, costs):
        ticks[node] = max(round(first / tick), 1)
        ticks[node + 1] = max(round((first + second) / tick) - ticks[node], 1)
    starts, ends = map(np.array, graph.longest_paths(ticks))
    ends[paired] = ends[paired + 1]
    return starts, ends


def _made(columns: Columns, ends: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return, for each node, the end of the last pass of its rank up to it."""
    latest = columns.latest(IS_PASS[columns.kind])
    return np.where(latest < 0, 0, ends[latest])
