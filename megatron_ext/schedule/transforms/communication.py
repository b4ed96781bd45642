"""Insert the messages between ranks.

A send follows the pass that made its tensor at once. A receive is posted ahead: while its
predecessor on the channel is being used (`Problem.receives_ahead`), so that a message is under way
during compute and at most two buffers a channel are in use. Receives are posted in the order in
which the other rank sends.
"""

from __future__ import annotations

from collections import defaultdict

from megatron_ext.schedule.action import Action
from megatron_ext.schedule.graph import Channel, channel_of, needed, partner_of
from megatron_ext.schedule.kinds import RULES, Kind, Lane, Source
from megatron_ext.schedule.schedule import Problem, Schedule

_SENDS_AFTER: dict[Kind, list[Kind]] = {
    kind: [
        send
        for send, rule in RULES.items()
        if rule.lane is Lane.SEND and any(kind in need.kinds for need in rule.needs)
    ]
    for kind in RULES
}


def communicate(schedule: Schedule, problem: Problem) -> Schedule:
    """``schedule``, which has compute actions only, with its sends and receives."""
    placement = schedule.placement
    with_sends: list[list[Action]] = []
    arriving: dict[Channel, list[Action]] = defaultdict(list)  # receives, in the sender's order
    for row in schedule.rows:
        rank_actions: list[Action] = []
        for action in row:
            rank_actions.append(action)
            for kind in _SENDS_AFTER[action.kind]:
                if placement.is_remote(action.stage, RULES[kind].neighbour):
                    send = Action(action.stage, kind, action.microbatch)
                    rank_actions.append(send)
                    arriving[channel_of(send, placement)].append(partner_of(send))
        with_sends.append(rank_actions)

    rows = []
    for rank, rank_actions in enumerate(with_sends):
        used_at: dict[Action, int] = {}
        for index, action in enumerate(rank_actions):
            for need, choices in needed(action, placement):
                if need.source is Source.REMOTE:
                    used_at[choices[0]] = index
        posted_before: dict[int, list[Action]] = defaultdict(list)
        for channel, receives in arriving.items():
            if channel.receiver == rank:
                for position, receive in _posts(receives, used_at, problem.receives_ahead):
                    posted_before[position].append(receive)
        with_messages: list[Action] = []
        for index, action in enumerate(rank_actions):
            with_messages += [*posted_before[index], action]
        rows.append(tuple(with_messages))
    return Schedule(schedule.name, placement, tuple(rows))


def _posts(
    receives: list[Action], used_at: dict[Action, int], ahead: int
) -> list[tuple[int, Action]]:
    """Where in its rank's row each receive is posted, in channel order."""
    # A receive must be posted before its own use, and before that of all that follow it.
    latest: list[int] = []
    bound = max(used_at.values(), default=0)
    for receive in reversed(receives):
        bound = min(bound, used_at.get(receive, bound))
        latest.append(bound)
    latest.reverse()
    early = [0] * ahead + latest
    return list(zip(early, receives, strict=False))
