"""Insertion of the messages between ranks.

A send directly follows the pass, or the pair of passes, that made its tensor. Receives stand at the
start of their rank's row, in the order in which the other rank sends. No send waits for a receive
to be posted there, and `message_order` moves each receive to its final position.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache

from megatron_ext.compile.program.graph import has_place, partner_of
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.kinds import RULES, Kind, Lane
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule

_SENDS_AFTER: dict[Kind, list[Kind]] = {
    kind: [
        send
        for send, rule in RULES.items()
        if rule.lane is Lane.SEND and any(kind in need.kinds for need in rule.needs)
    ]
    for kind in RULES
}


def communicate(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule``, which has only passes, with sends and receives between ranks
    inserted."""
    placement = schedule.placement
    ends_of = cache(lambda stage, kind: _ends(stage, kind, placement))
    with_sends: list[list[Action]] = []
    receives: dict[int, list[Action]] = defaultdict(list)  # by rank
    first_of_two = {overlapped.forward for overlapped in schedule.pairs}
    for row in schedule.rows:
        rank_actions: list[Action] = []
        sends: list[Action] = []
        for action in row:
            rank_actions.append(action)
            stage, kind, microbatch = action
            for send, receiver, there, receive in ends_of(stage, kind):
                sends.append(Action(stage, send, microbatch))
                receives[receiver].append(Action(there, receive, microbatch))
            if action not in first_of_two:
                rank_actions += sends
                sends = []
        with_sends.append(rank_actions)
    rows = tuple((*receives[rank], *actions) for rank, actions in enumerate(with_sends))
    return replace(schedule, rows=rows)


def _ends(stage: int, kind: Kind, placement: Placement) -> list[tuple[Kind, int, int, Kind]]:
    """Return the messages that a pass of ``kind`` on ``stage`` sends.

    Each entry is the kind of its send, and the rank, stage and kind of its receive.
    """
    ends = []
    for send in _SENDS_AFTER[kind]:
        if has_place(send, stage, placement):
            there, receive, _ = partner_of(Action(stage, send, 0), placement)
            ends.append((send, placement.rank_of[there], there, receive))
    return ends
