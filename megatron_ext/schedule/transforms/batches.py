"""Order the messages that share one communicator, so that no rank waits for ever.

Each message has a time: when the pass that makes it ends, were no message to wait for another. A
rank receives a message of time t after all its own passes that end by t and before all that end
later; if one of them ends at t and sends, right before that send, so that two neighbours swap in
one batch. So whatever a message waits for is of an earlier time, and nothing can go round in a
circle.

Times are whole ticks, and no pass takes none: they rise along every dependency, and passes that end
together do so exactly.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.schedule.action import Action
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.graph import build_graph, partner_of
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.schedule import Problem, Schedule, is_compute

_TICKS = 10**6  # of the longest pass

_PLACE_IN_TIME = {Lane.COMPUTE: 0, Lane.RECEIVE: 1, Lane.SEND: 2}


def batch_messages(schedule: Schedule, problem: Problem) -> Schedule:
    """``schedule``, which has its messages, with its receives where one communicator wants them.

    One whose passes wait for one another is left as it is, for `prove` to show how.
    """
    times = _times(schedule, problem.costs)
    if times is None:
        return schedule

    def place(action: Action) -> tuple[int, int, Action]:
        lane = RULES[action.kind].lane
        sender = partner_of(action) if lane is Lane.RECEIVE else action
        return times[sender], _PLACE_IN_TIME[lane], action

    return replace(schedule, rows=tuple(tuple(sorted(row, key=place)) for row in schedule.rows))


def _times(schedule: Schedule, costs: Costs) -> dict[Action, int] | None:
    """When each pass ends, and for a send the pass before it; None if they cannot all end."""
    graph = build_graph(schedule)
    if len(graph.order) < len(graph.actions):
        return None
    longest = max(costs.of(action) for action in graph.actions if is_compute(action))
    tick = longest / _TICKS or 1.0  # an evaluation's passes may cost nothing
    ends = [0] * len(graph.actions)
    for node in graph.order:
        action = graph.actions[node]
        ticks = round(costs.of(action) / tick)
        begin = max((ends[earlier] for earlier in graph.before[node]), default=0)
        ends[node] = begin + (max(ticks, 1) if is_compute(action) else ticks)
    times: dict[Action, int] = {}
    now = 0
    for action, end in zip(graph.actions, ends, strict=True):
        if is_compute(action):
            now = end
        times[action] = now
    return times
