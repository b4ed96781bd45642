"""The part of a step that runs before the last step's verdict is known, and may have to be undone.

Until SETTLE a rank computes with parameters from an optimizer step on a partial state. If that step
is rolled back, so is everything computed since. Until then no gradient may have been changed, and
no message may have one end before the verdict and the other after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.compile.program.graph import needed, partner_of
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES, Lane, Source, Where
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import is_compute


def settles_at(row: Sequence[Action]) -> int | None:
    """Return the position of SETTLE, the wait for the last step's verdict, in a rank's ``row``, or
    None."""
    return next((at for at, action in enumerate(row) if action.kind is Kind.SETTLE), None)


def can_be_undone(action: Action, placement: Placement) -> bool:
    """Return whether all results of ``action`` can be dropped after a failed optimizer step.

    This is so for a forward pass without a loss, and for an action that is no pass.
    """
    if not is_compute(action):
        return True
    return RULES[action.kind].in_evaluation and not placement.is_last(action.stage)


def latest_settling(rows: Sequence[Sequence[Action]], placement: Placement) -> list[int]:
    """Return how many actions of each rank can run before the verdict on the last optimizer step.

    These are all that can be undone, as far as the other ends of their messages come before the
    verdict of their ranks too. (A receive whose message is not needed may stay behind alone.) The
    union of two such choices is a choice too, so there is a largest: actions that do not fit are
    removed until all fit.
    """
    lengths = [
        next((at for at, a in enumerate(row) if not can_be_undone(a, placement)), len(row))
        for row in rows
    ]
    place = {a: (rank, at) for rank, row in enumerate(rows) for at, a in enumerate(row)}

    def is_before(action: Action) -> bool:
        rank, at = place[action]
        return at < lengths[rank]

    changed = True
    while changed:
        changed = False
        for rank, row in enumerate(rows):
            for at, action in enumerate(row[: lengths[rank]]):
                if not all(map(is_before, _other_ends(action, placement))):
                    lengths[rank] = at
                    changed = True
                    break
    return lengths


def first_crossing(
    rows: Sequence[Sequence[Action]], placement: Placement
) -> tuple[Action, Action] | None:
    """Return the first message with one end before its rank's verdict and the other end after it.

    The verdict tells whether the last optimizer step is valid. None if there is no such message.
    """
    before: set[Action] = set()
    for row in rows:
        before.update(row[: settles_at(row)])
    for row in rows:
        for action in row:
            rule = RULES[action.kind]
            if not rule.is_message or rule.where is Where.RANK or action not in before:
                continue
            partner = partner_of(action, placement)
            if partner not in before:
                return action, partner
    return None


def _other_ends(action: Action, placement: Placement) -> list[Action]:
    """Return the actions of other ranks that must come before their verdict if ``action`` does.

    The verdict tells whether the last optimizer step is valid.
    """
    rule = RULES[action.kind]
    if rule.lane is Lane.SEND:
        return [partner_of(action, placement)]
    if not is_compute(action):
        return []
    return [
        partner_of(choices[0], placement)
        for need, choices in needed(action, placement)
        if need.source is Source.REMOTE
    ]
