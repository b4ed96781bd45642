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
then, right before it sends what it has made at that time itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.problem import P2P, Problem
from megatron_ext.schedule.program.graph import Graph, build_graph
from megatron_ext.schedule.schedule import Schedule, is_compute

_TICKS = 10**6  # of the longest pass

# Of the longest pass, what a hop takes at the least: messages that cost nothing in the plan take
# some time in truth, and a pass that depends on one should not come before others for nothing.
_LEAST_HOP = 1 / 32

_BATCHED_PLACE = {Lane.COMPUTE: 0, Lane.RECEIVE: 1, Lane.SEND: 2}

_Key = tuple[float, int, int]  # a time, what comes first at that time, and a place among those


def order_messages(schedule: Schedule, problem: Problem) -> Schedule:
    """``schedule``, which has its messages, in one sequence.

    One whose passes wait for one another is left as it is, for `prove` to show how.
    """
    graph = build_graph(schedule)
    if len(graph.order) < len(graph.actions):
        return schedule
    keys = _batched if problem.extras.p2p is P2P.BATCHED else _in_sequence
    key_of = dict(zip(graph.actions, keys(graph, problem.costs), strict=True))
    rows = tuple(tuple(sorted(row, key=key_of.__getitem__)) for row in schedule.rows)
    return replace(schedule, rows=rows)


def _in_sequence(graph: Graph, costs: Costs) -> Iterator[_Key]:
    """A key for each node: the two ends of a message share theirs, and so do a collective's."""
    starts, ends = _times(graph, costs, _LEAST_HOP)
    made = _last_pass_ends(graph, ends)
    place = {node: place for place, node in enumerate(graph.order)}
    leaders = {
        (action.kind, action.microbatch): node
        for node, action in enumerate(graph.actions)
        if RULES[action.kind].lane is Lane.COLLECTIVE and node not in graph.followers
    }
    for node, action in enumerate(graph.actions):
        lane = RULES[action.kind].lane
        if lane is Lane.COLLECTIVE:
            leader = leaders[action.kind, action.microbatch]
            yield starts[leader], 2, place[leader]
        elif RULES[action.kind].is_message:
            send = graph.partners[node] if lane is Lane.RECEIVE else node
            yield made[send], 1, send
        else:
            yield ends[node], 0, node


def _batched(graph: Graph, costs: Costs) -> Iterator[_Key]:
    """A key for each node, where messages share one communicator."""
    _, ends = _times(graph, costs, least_hop=0.0)
    made = _last_pass_ends(graph, ends)
    by_name = {action: place for place, action in enumerate(sorted(graph.actions))}
    for node, action in enumerate(graph.actions):
        lane = RULES[action.kind].lane
        sender = graph.partners[node] if lane is Lane.RECEIVE else node
        yield made[sender], _BATCHED_PLACE[lane], by_name[action]


def _times(graph: Graph, costs: Costs, least_hop: float) -> tuple[list[float], list[float]]:
    """When each node starts and ends, in ticks. ``least_hop`` is a share of the longest pass."""
    longest = max(costs.of(action) for action in graph.actions if is_compute(action))
    costs = replace(costs, hop=max(costs.hop, longest * least_hop))
    tick = longest / _TICKS or 1.0  # an evaluation's passes may cost nothing
    ticks = []
    for node, action in enumerate(graph.actions):
        takes = 0 if node in graph.followers else round(costs.of(action) / tick)
        ticks.append(max(takes, 1) if is_compute(action) else takes)
    return graph.longest_paths(ticks)


def _last_pass_ends(graph: Graph, ends: list[float]) -> list[float]:
    """For each node, when the last pass of its rank up to it ends."""
    made: list[float] = []
    now, rank = 0.0, 0
    for node, action in enumerate(graph.actions):
        if graph.ranks[node] != rank:
            now, rank = 0.0, graph.ranks[node]
        if is_compute(action):
            now = ends[node]
        made.append(now)
    return made
