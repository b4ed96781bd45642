"""Predict when each action of a program runs."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.graph import Graph, build_graph
from megatron_ext.schedule.kinds import HOST_LANES, RULES
from megatron_ext.schedule.schedule import Problem, Schedule
from megatron_ext.schedule.timeline import Event, Timeline
from megatron_ext.schedule.transforms.communication import communicate
from megatron_ext.schedule.verify import Program


def simulate(program: Program, costs: Costs) -> Timeline:
    """Start every action as soon as all it waits for has ended (`graph`).

    A message takes ``costs.hop`` from when both ends are ready, a collective from when all ranks
    are; messages of one channel follow one another. One pass over the actions.
    """
    return _run(program.graph, program.schedule, costs)


def simulate_unproved(schedule: Schedule, problem: Problem) -> Timeline:
    """The same for a schedule that is still being made, without its messages as it is.

    What waits in a circle starts at 0 and takes no time.
    """
    schedule = communicate(schedule, problem)
    return _run(build_graph(schedule), schedule, problem.costs)


def simulate_messages(schedule: Schedule, problem: Problem) -> Timeline:
    """The same for one that has its messages."""
    return _run(build_graph(schedule, problem.p2p), schedule, problem.costs)


def _run(graph: Graph, schedule: Schedule, costs: Costs) -> Timeline:
    seconds: dict[tuple[int, Kind], float] = {}  # the same for every microbatch
    lasts = [0.0] * len(graph.actions)
    for node, action in enumerate(graph.actions):
        key = action.stage, action.kind
        if key not in seconds:
            seconds[key] = costs.of(action)
        if node not in graph.followers:
            lasts[node] = seconds[key]
    links = _links(graph, costs)
    start, end = _take_turns(graph, lasts, links) if links else _follow(graph, lasts)
    events = tuple(map(Event, graph.ranks, graph.actions, start, end))
    return Timeline(schedule, events)


def _follow(graph: Graph, lasts: list[float]) -> tuple[list[float], list[float]]:
    """Starts and ends of nodes of which none waits but for those before it."""
    start, end = [0.0] * len(lasts), [0.0] * len(lasts)
    for node in graph.order:
        start[node] = max([end[earlier] for earlier in graph.before[node]], default=0.0)
        end[node] = start[node] + lasts[node]
    return start, end


def _links(graph: Graph, costs: Costs) -> dict[int, object]:
    """By node of a copy, the link to the host that others use too. Empty if none is shared."""
    host = costs.host
    if host is None or not host.is_shared:
        return {}
    lanes = ((node, RULES[action.kind].lane) for node, action in enumerate(graph.actions))
    return {n: host.link(graph.ranks[n], lane) for n, lane in lanes if lane in HOST_LANES}


def _take_turns(
    graph: Graph, lasts: list[float], links: Mapping[int, object]
) -> tuple[list[float], list[float]]:
    """The same where a copy waits until its link is free: whose turn came first goes first."""
    start, end = [0.0] * len(lasts), [0.0] * len(lasts)
    after: list[list[int]] = [[] for _ in lasts]
    for node, nodes in enumerate(graph.before):
        for earlier in nodes:
            after[earlier].append(node)
    waiting = [len(nodes) for nodes in graph.before]
    free: dict[object, float] = {}
    ready = [(0.0, node) for node, count in enumerate(waiting) if not count]
    while ready:
        _, node = heapq.heappop(ready)
        link = links.get(node)
        if link is not None:
            start[node] = max(start[node], free.get(link, 0.0))
            free[link] = start[node] + lasts[node]
        end[node] = start[node] + lasts[node]
        for later in after[node]:
            waiting[later] -= 1
            start[later] = max(start[later], end[node])
            if not waiting[later]:
                heapq.heappush(ready, (start[later], later))
    return start, end
