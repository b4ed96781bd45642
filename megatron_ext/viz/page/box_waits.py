"""Waits between the boxes of a page.

A page shows on request what a pass has waited for. For a simulated step these events come from its
dependency graph; for a measured step only the passes that made a pass's inputs are known.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.compile.program.graph import Graph
from megatron_ext.observe.replay import Replay
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.timeline import Event, Timeline

Nodes = tuple[int, ...]  # numbers of events of a step


def waits_of_program(
    graph: Graph, events: Sequence[Event], is_shown: Sequence[bool]
) -> list[Nodes]:
    """Return, for each event of a simulated step, the events on the page that it waited for.

    ``is_shown`` tells which events are on the page. An event that is not shown (a wait, a receive,
    a message that takes no time) is replaced by the event that it waited for longest, and a message
    also by the pass that sent it.
    """
    waits: list[Nodes] = [()] * len(events)
    stands_for: list[Nodes] = [()] * len(events)
    partners = graph.partners.tolist()
    for node in graph.order.tolist():
        earlier = graph.before[node]
        waited_for = tuple(dict.fromkeys(n for early in earlier for n in stands_for[early]))
        rank = events[node].rank
        # If a pass waits for an earlier pass of its rank, the page shows only the wait for the
        # directly preceding pass, unless the earlier pass is needed itself.
        waits[node] = tuple(
            n
            for n in waited_for
            if n in earlier or events[n].rank != rank or not _is_pass(events[n])
        )
        if is_shown[node]:
            stands_for[node] = (node,)
            continue
        lane = RULES[events[node].action.kind].lane
        source: Nodes = ()
        if lane is Lane.RECEIVE:
            source = stands_for[partners[node]]
        elif lane is Lane.SEND:
            source = tuple(n for n in waited_for if _same_microbatch(events[n], events[node]))
        latest = sorted(waited_for, key=lambda n: (-events[n].end, events[n].rank == rank))
        stands_for[node] = tuple(dict.fromkeys([*source, *latest[:1]]))
    return waits


def _is_pass(event: Event) -> bool:
    return RULES[event.action.kind].lane is Lane.COMPUTE


def _same_microbatch(event: Event, other: Event) -> bool:
    action, another = event.action, other.action
    return (action.stage, action.microbatch) == (another.stage, another.microbatch)


def waits_of_passes(timeline: Timeline) -> list[Nodes]:
    """Return, for each pass of ``timeline``, the passes that make its inputs.

    This is for steps of which only the passes are known, such as measured ones.
    """
    inputs = Replay(timeline.schedule).inputs
    place = {event.action: number for number, event in enumerate(timeline.events)}
    return [
        tuple(dict.fromkeys(place[m] for m in inputs.get(event.action, ()) if m in place))
        for event in timeline.events
    ]
