"""Predict when each action of a program runs."""

from __future__ import annotations

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.timeline import Event, Timeline
from megatron_ext.schedule.verify import Program


def simulate(program: Program, costs: Costs) -> Timeline:
    """Start every action as soon as all it waits for has ended (`graph`).

    A message takes ``costs.hop`` from when both ends are ready; messages of one channel follow one
    another. One pass over the actions.
    """
    graph = program.graph
    start = [0.0] * len(graph.actions)
    end = [0.0] * len(graph.actions)
    seconds: dict[tuple[int, Kind], float] = {}  # the same for every microbatch
    for node in graph.order:
        action = graph.actions[node]
        key = action.stage, action.kind
        if key not in seconds:
            seconds[key] = costs.of(action)
        start[node] = max([end[earlier] for earlier in graph.before[node]], default=0.0)
        end[node] = start[node] + seconds[key]
    events = tuple(map(Event, graph.ranks, graph.actions, start, end))
    return Timeline(program.schedule, events)
