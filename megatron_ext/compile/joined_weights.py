"""W of a microbatch's slices as one pass.

The gradients of all weights, those of all experts of a rank too, are read and written for every
slice, which takes longer than the products of a short slice. So the W of the slices are moved
behind each other, to the last of them, where the runtime computes each gradient once. Until then
the rank holds what these W need. That is more than with each W at its place, and at most what one
microbatch needs on each stage.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import override

from megatron_ext.compile.build_hooks import BuildHooks
from megatron_ext.compile.program.memory import limited_amount, peaks
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.schedule.action import Action, Kind, Row, whole_of
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.limit import fits
from megatron_ext.schedule.problem import Offload, Problem
from megatron_ext.schedule.schedule import Family, Schedule

_TRIES = 6  # number of times that a family is asked for a schedule with lower memory


class JoinedWeightsBuild(BuildHooks):
    """Feature that joins the weight-gradient passes W of a microbatch's slices."""

    @override
    def is_on(self, problem: Problem) -> bool:
        return problem.slices.joined_weights

    @override
    def check(self, resolved: ResolvedSpec, problem: Problem) -> None:
        if not resolved.traits.splits_backward:
            raise ValueError(
                f"schedule {resolved.spec} does not split backward passes, so no weight gradients "
                "(W) of a sequence's slices can be joined; take a schedule that splits them, "
                "such as zb-h1, or drop --pipeline-join-slice-weights"
            )
        options = problem.options
        # These options do not go with joined W. Offload reloads the stored tensors that W needs for
        # each W alone, but a joined W needs those of all slices until its end. Recompute fit
        # assumes that each slice has its own W.
        for is_given, what in (
            (options.activation_offload is not Offload.NONE, "offload of activations"),
            (options.recompute.fit, "recompute fit"),
        ):
            if is_given:
                raise ValueError(
                    f"joined weight gradients (W) of slices do not go with {what}, which cannot "
                    "tell how long the inputs of such a W are held: drop one of the two options"
                )

    @override
    def with_own_costs(self, problem: Problem) -> Problem:
        return replace(problem, costs=problem.priced_costs)

    @override
    def made(self, resolved: ResolvedSpec, family: Family, problem: Problem) -> Schedule:
        return joined_within_limit(family, problem)

    @override
    def completed(self, passes: Schedule, problem: Problem) -> Schedule:
        return join_weights(passes)


def joined_within_limit(family: Family, problem: Problem) -> Schedule:
    """Return the passes of ``family`` with joined W, within the memory limit if that is possible.

    If joined W exceed the limit, the family is called again with a limit that is lower by the
    excess. If that fails too, the first passes are returned, so that `prove` says how much memory
    they need.
    """
    limit = problem.memory_limit
    first = schedule = join_weights(family(problem))
    if limit is None:
        return first
    amount, allowed = limited_amount(limit, schedule, problem.costs)
    left = allowed
    for _ in range(_TRIES):
        most = max(peaks(schedule, amount))
        if fits(most, allowed):
            return schedule
        left -= most - allowed
        if left <= 0:
            break
        try:
            schedule = join_weights(family(replace(problem, memory_limit=limit.of(left))))
        except ValueError:
            break
    return first


def join_weights(schedule: Schedule) -> Schedule:
    """Return ``schedule`` with the W of all slices of a microbatch right after each other.

    They run from the last slice to the first, at the place of the W that came last. Whole backward
    passes are split into I and W.
    """
    return replace(schedule, rows=tuple(map(_joined, schedule.rows)))


def _joined(row: Row) -> Row:
    row = tuple(part for action in row for part in _split(action))
    waiting: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for action in row:
        if action.kind is Kind.BACKWARD_WEIGHT:
            waiting[_microbatch_of(action)].append(action)
    joined: list[Action] = []
    for action in row:
        if action.kind is not Kind.BACKWARD_WEIGHT:
            joined.append(action)
            continue
        passes = waiting[_microbatch_of(action)]
        if action is passes[-1]:
            joined += sorted(passes, key=lambda one: -one.microbatch)
    return tuple(joined)


def _split(action: Action) -> tuple[Action, ...]:
    if action.kind is not Kind.FULL_BACKWARD:
        return (action,)
    return tuple(action._replace(kind=kind) for kind in RULES[action.kind].covers)


def _microbatch_of(action: Action) -> tuple[int, int]:
    return action.stage, whole_of(action.microbatch)
