"""Errors and seconds of pairs: two passes of a rank that run as one (`OverlappedPasses`).

The two passes of a pair take their seconds together, and neither may wait for the other. Proof and
simulation both need these rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from megatron_ext.compile.program.graph import needed
from megatron_ext.schedule.action import Action, Kind, OverlappedPasses
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.schedule import Schedule


def what_is_wrong(schedule: Schedule) -> tuple[str, list[Action]] | None:
    """Return why two passes that ``schedule`` overlaps cannot overlap, and the offending actions.

    None if no two of them show an error by themselves. (A dependency through other ranks is a cycle
    of the graph of waits.)
    """
    followers = {
        action: after for row in schedule.rows for action, after in pairwise((*row, None)) if action
    }
    pairs = sorted(schedule.pairs)
    overlapped_of: dict[Action, OverlappedPasses] = {}
    for overlapped in pairs:
        for action in overlapped:
            if (other := overlapped_of.setdefault(action, overlapped)) != overlapped:
                return f"{action} is in two pairs, {other} and {overlapped}", [*other, *overlapped]
    for overlapped in pairs:
        forward, backward = overlapped
        if backward.kind not in RULES[forward.kind].overlaps_with:
            return f"{overlapped} is no pair: a pair is F with I or B", list(overlapped)
        choices = [action for _, some in needed(backward, schedule.placement) for action in some]
        if forward in choices:
            return f"{overlapped} cannot run as one: {backward} needs {forward}", list(overlapped)
        if followers.get(forward) != backward:
            after = followers.get(forward) or "nothing"
            return f"{overlapped} cannot run as one: {after} comes right after {forward}", list(
                overlapped
            )
    return None


def seconds_in_pairs(schedule: Schedule, costs: Costs) -> Iterator[tuple[int, float, float]]:
    """Yield, for each two overlapped passes, the number of the forward pass and the seconds of
    both.

    In the account of a rank's work, the two passes run one after the other, F first, and split
    their joint seconds in the proportion of their seconds alone, so the work of a rank adds up.
    """

    @cache
    def shares(forward_stage: int, stage: int, kind: Kind) -> tuple[float, float]:
        forward, backward = Action(forward_stage, Kind.FORWARD, 0), Action(stage, kind, 0)
        both, alone = costs.of_overlapped(forward, backward), costs.of(forward)
        sequential = alone + costs.of(backward)
        first = both * alone / sequential if sequential else 0.0
        return first, both - first

    arrays = schedule.arrays
    for node in schedule.paired.tolist():
        stage, kind = arrays.stage_kinds[arrays.stage_kind[node + 1]]
        yield node, *shares(int(arrays.stage[node]), stage, kind)
