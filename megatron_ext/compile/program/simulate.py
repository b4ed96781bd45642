"""Simulation of the time at which each action of a program runs.

Planner and searches compare schedules by their predicted seconds, so the prediction must follow the
executor's rules. Times are longest paths in the graph of waits (`graph`): an action starts when all
that it waits for has ended. Only copies over a shared link need more than this: they take turns in
order of time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np

from megatron_ext.compile.program.communication import communicate
from megatron_ext.compile.program.graph import Device, Graph, build_graph
from megatron_ext.compile.program.pairs import seconds_in_pairs
from megatron_ext.compile.program.verify import Program
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.action_arrays import IS_PASS
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import HOST_LANES, RULES, Lane
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule, right_behind_own_input
from megatron_ext.schedule.timeline import Event, Timeline

# Largest number of consecutive steps that are simulated; after half of them the step time is
# constant.
_STEPS = 16
_SAME = 1e-9  # largest difference that counts as rounding, as a share of a time


def simulate(program: Program, costs: Costs, device: Device = Device.PARALLEL) -> Timeline:
    """Return the predicted timeline of ``program``: every action starts as soon as it can.

    It starts when all that it waits for on ``device`` has ended (`graph`). A message takes its
    seconds from the time when both ends are ready, a collective from the time when all ranks are;
    messages of one channel follow one another. Megatron's own pipeline functions post and await
    messages in their own order (`Program.as_run`), and ``device`` is then that of parallel streams.
    The simulation is one pass over the actions.
    """
    schedule, graph = program.as_run
    if device is not Device.PARALLEL:
        p2p, schedule = program.problem.options.p2p, program.schedule
        graph = build_graph(schedule, p2p, device, program.known_order)
    return _run(graph, schedule, costs)


def simulate_steps(program: Program, costs: Costs, steps: int) -> tuple[Timeline, ...]:
    """Simulate ``steps`` consecutive steps of ``program``; return their timelines on one clock.

    With post-validation a rank begins a step when it has ended its own part of the last one.
    Without it, all ranks wait for the slowest of them, as around a synchronous optimizer.
    """
    return tuple(timeline for timeline, _ in islice(_one_after_the_other(program, costs), steps))


def step_seconds(program: Program, costs: Costs) -> float:
    """Return the seconds of a step of ``program`` in the long run.

    This is the makespan, or with post-validation, where steps overlap, about the span. (A rank that
    idles in the middle of its span may wait less if it begins later.)
    """
    if not program.problem.options.steps_overlap or program.problem.forward_only:
        return _makespan(program, costs)
    before = [0.0] * program.problem.ranks
    ends = []
    for timeline, free in islice(_one_after_the_other(program, costs), _STEPS):
        later = [now - then for now, then in zip(free, before, strict=True)]
        if max(later) - min(later) <= _SAME * max(later):
            # Every later step takes equally long, since this step has moved the free times of all
            # ranks by the same amount.
            return max(later)
        before = free
        ends.append(max(row[-1].end for row in timeline.compute))
    half = _STEPS // 2
    return (ends[-1] - ends[-1 - half]) / half


def _makespan(program: Program, costs: Costs) -> float:
    """Return the seconds from the first start to the last end, for searches that need nothing
    else."""
    schedule, graph = program.as_run
    starts, ends = map(np.array, times(graph, schedule, costs))
    is_pass = IS_PASS[schedule.arrays.kind]
    return float(ends[is_pass].max() - starts[is_pass].min())


def _one_after_the_other(program: Program, costs: Costs) -> Iterator[tuple[Timeline, list[float]]]:
    """Yield the timeline of each of endlessly many steps, and when each rank is free afterwards."""
    free = [0.0] * program.problem.ranks
    schedule, graph = program.as_run
    while True:
        timeline = _run(graph, schedule, costs, free)
        free = list(free)
        for event in timeline.events:
            if RULES[event.action.kind].is_blocking:
                free[event.rank] = max(free[event.rank], event.end)
        if not program.problem.options.steps_overlap:
            free = [max(free)] * len(free)
        yield timeline, free


def simulate_unproved(schedule: Schedule, problem: Problem) -> Timeline:
    """Return the timeline of a schedule under construction, which has no messages yet.

    Messages are inserted. Actions in a cyclic wait start at 0 and take no time.
    """
    schedule = communicate(schedule, problem)
    return _run(build_graph(schedule), schedule, problem.costs)


def simulate_messages(schedule: Schedule, problem: Problem) -> Timeline:
    """Return the predicted timeline of a schedule that has its messages but is not proved."""
    return _run(build_graph(schedule, problem.options.p2p), schedule, problem.costs)


def _run(
    graph: Graph, schedule: Schedule, costs: Costs, free: Sequence[float] | None = None
) -> Timeline:
    """Return the timeline of the actions in ``graph``, simulated under ``costs``.

    ``free`` is the earliest start of each rank, if not 0.
    """
    starts, ends = times(graph, schedule, costs, free)
    events = zip(graph.ranks.tolist(), graph.actions, starts, ends, strict=True)
    return Timeline(schedule, tuple(map(_event, events)))


def times(
    graph: Graph, schedule: Schedule, costs: Costs, free: Sequence[float] | None = None
) -> tuple[list[float], list[float]]:
    """Return the simulated start and end of each node of ``graph``, in seconds."""
    lasts = seconds_of(graph, schedule, costs)
    links = links_of(graph, costs)
    earliest = [0.0] * len(lasts) if free is None else _earliest(graph, free)
    if links:
        return take_turns(graph, lasts, links, earliest)
    return graph.longest_paths(lasts, earliest)


def seconds_of(graph: Graph, schedule: Schedule, costs: Costs) -> list[float]:
    """Return the seconds of each node of ``graph`` under ``costs``, with savings of adjacent
    passes."""
    arrays = schedule.arrays
    lasts = arrays.of_each(costs.of, bool(costs.at_places))
    for node in arrays.numbers[graph.leaders != arrays.numbers].tolist():
        lasts[node] = 0.0
    if any(costs.passes.fused_backward_saving):
        for node in right_behind_own_input(arrays).tolist():
            lasts[node] -= costs.fused_backward_saving_by(graph.actions[node])
    for node, first, second in seconds_in_pairs(schedule, costs):
        lasts[node], lasts[node + 1] = first, second
    return lasts


# Function that makes an Event from a tuple without checks. `Event._make` does the same, and would
# take most of a simulation's time.
_event: Callable[[tuple[int, Action, float, float]], Event] = partial(tuple.__new__, Event)


def _earliest(graph: Graph, free: Sequence[float]) -> list[float]:
    """Return for each node the time at which its rank is ``free``; for a message, both its
    ranks."""
    ranks, partners = graph.ranks.tolist(), graph.partners.tolist()
    times = [free[rank] for rank in ranks]
    for node, action in enumerate(graph.actions):
        rule = RULES[action.kind]
        if rule.is_message:
            times[node] = max(times[node], free[ranks[partners[node]]])
        elif rule.lane is Lane.COLLECTIVE:
            times[node] = max(free)
    return times


def links_of(graph: Graph, costs: Costs) -> dict[int, object]:
    """Return the host link of each copy, by node; empty if no copies have to share a link."""
    host = costs.host
    if host is None or not host.is_shared:
        return {}
    lanes = ((node, RULES[action.kind].lane) for node, action in enumerate(graph.actions))
    ranks = graph.ranks.tolist()
    return {n: host.link(ranks[n], lane) for n, lane in lanes if lane in HOST_LANES}


def take_turns(
    graph: Graph, lasts: list[float], links: Mapping[int, object], earliest: list[float]
) -> tuple[list[float], list[float]]:
    """Return start and end times of all nodes, where copies to the host wait for a free link.

    Otherwise times are as in `Graph.longest_paths`. The copy that could start first goes first.
    """
    start, end = list(earliest), [0.0] * len(lasts)
    after = graph.before.inverse
    waiting: list[int] = np.diff(graph.before.bounds).tolist()
    free: dict[object, float] = {}
    ready = [(start[node], node) for node, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
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
