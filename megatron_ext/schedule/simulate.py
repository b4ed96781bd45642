"""Predict when each action of a program runs."""

from __future__ import annotations

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.graph import Graph, build_graph
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


def _run(graph: Graph, schedule: Schedule, costs: Costs) -> Timeline:
    start = [0.0] * len(graph.actions)
    end = [0.0] * len(graph.actions)
    seconds: dict[tuple[int, Kind], float] = {}  # the same for every microbatch
    for node in graph.order:
        action = graph.actions[node]
        key = action.stage, action.kind
        if key not in seconds:
            seconds[key] = costs.of(action)
        start[node] = max([end[earlier] for earlier in graph.before[node]], default=0.0)
        end[node] = start[node] + (0.0 if node in graph.followers else seconds[key])
    events = tuple(map(Event, graph.ranks, graph.actions, start, end))
    return Timeline(schedule, events)
