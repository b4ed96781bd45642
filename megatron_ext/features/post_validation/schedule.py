"""Insertion of the messages of the optimizer's post-validation (Qi et al. 2024, section 4).

The ranks of a pipeline form a chain, in the order of their first stages. After its last pass a rank
receives the combined gradient state of the ranks before it, adds its own, takes its optimizer step,
and sends the sum on. The last rank then knows the state of all ranks, and so whether the optimizer
steps were right. This verdict goes back through the chain while the next step begins. A rank waits
for the verdict as late as possible: just before a result that it could not undo (`speculation`).

    stage 0   0RECV_V0          0F0 0F1 0F2 | 0SETTLE0 0F3 ... 0W7          0STEP0 0SEND_P0
    stage 1   1RECV_V0 1SEND_V0     1F0     | 1SETTLE0 1F1 ... 1W7 1RECV_P0 1STEP0 1SEND_P0
    stage 2            2SEND_V0             | 2SETTLE0 2F0 ... 2W7 2RECV_P0 2STEP0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import override

from megatron_ext.compile.build_hooks import BuildHooks
from megatron_ext.compile.program.graph import has_place, partner_of
from megatron_ext.compile.program.speculation import latest_settling
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule, Transform


class PostValidationBuild(BuildHooks):
    """Part of the construction of programs that inserts the messages of post-validation."""

    @override
    def is_on(self, problem: Problem) -> bool:
        return problem.options.steps_overlap

    @override
    def after_messages(self, problem: Problem) -> Sequence[Transform]:
        return (validate_afterwards,)


def validate_afterwards(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule``, which has its messages and waits, with messages of post-validation."""
    placement = schedule.placement
    lengths = latest_settling(schedule.rows, placement)
    before = {a for row, length in zip(schedule.rows, lengths, strict=True) for a in row[:length]}
    rows = []
    for stages, row, length in zip(placement.stages_of, schedule.rows, lengths, strict=True):

        def of_rank(*kinds: Kind, stage: int = stages[0]) -> list[Action]:
            return [Action(stage, kind, 0) for kind in kinds if has_place(kind, stage, placement)]

        # Receives whose send comes after the other rank's verdict are moved behind this rank's
        # verdict.
        later = [
            action
            for action in row[:length]
            if RULES[action.kind].lane is Lane.RECEIVE
            and partner_of(action, placement) not in before
        ]
        rows.append(
            (
                *of_rank(Kind.RECV_V, Kind.SEND_V),
                *(a for a in row[:length] if a not in later),
                *of_rank(Kind.SETTLE),
                *later,
                *row[length:],
                *of_rank(Kind.RECV_P, Kind.STEP, Kind.SEND_P),
            )
        )
    return replace(schedule, rows=tuple(rows))
