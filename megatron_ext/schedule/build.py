"""From a choice to a program: family, transforms, proof."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.schedule.memory import leaving_room
from megatron_ext.schedule.registry import Choice
from megatron_ext.schedule.schedule import (
    P2P,
    Offload,
    Problem,
    Schedule,
    Transform,
    VocabularyParallel,
)
from megatron_ext.schedule.transforms.batches import batch_messages
from megatron_ext.schedule.transforms.communication import communicate
from megatron_ext.schedule.transforms.forward_only import keep_forward
from megatron_ext.schedule.transforms.offload import offload
from megatron_ext.schedule.transforms.post_validation import validate_afterwards
from megatron_ext.schedule.transforms.vocabulary import INTERVALS, divide_vocabulary
from megatron_ext.schedule.transforms.waits import await_sends
from megatron_ext.schedule.verify import Program, check_compute, prove
from megatron_ext.schedule.vocabulary_costs import share_vocabulary


def build_program(choice: Choice, problem: Problem) -> Program:
    """The proved program of ``choice`` for ``problem``.

    With vocabulary parallelism the program's own problem has costs whose vocabulary is shared.

    Raises:
        InvalidSchedule: the schedule does not solve the problem, or not within its memory limit.
    """
    shares = problem.vocabulary is not VocabularyParallel.NONE
    if shares:
        costs = share_vocabulary(problem.costs, problem.placement, problem.vocabulary)
        problem = replace(problem, costs=costs)
    transforms: list[Transform] = [communicate, await_sends]
    if problem.forward_only:
        transforms.insert(0, keep_forward)
    if problem.offload is not Offload.NONE and not problem.forward_only:
        transforms.insert(transforms.index(await_sends), offload)
    if problem.p2p is P2P.BATCHED:
        transforms.insert(transforms.index(communicate) + 1, batch_messages)
    if problem.post_validation and not problem.forward_only:
        transforms.append(validate_afterwards)
    schedule = _compute(choice, problem)
    if shares:
        schedule = divide_vocabulary(schedule, problem)
    for transform in transforms:
        schedule = transform(schedule, problem)
    return prove(schedule, problem)


def _compute(choice: Choice, problem: Problem) -> Schedule:
    """What the family makes, with room left for the microbatches that are held longer. What leaves
    for the host is not known yet: with offload there is no limit."""
    limit = problem.memory_limit if problem.offload is Offload.NONE else None
    if limit is not None and problem.vocabulary is not VocabularyParallel.NONE:
        limit = leaving_room(limit, INTERVALS[problem.vocabulary], problem)
    problem = replace(
        problem,
        memory_limit=limit,
        vocabulary=VocabularyParallel.NONE,
        offload=Offload.NONE,
    )
    schedule = choice.build(problem)
    check_compute(schedule, replace(problem, forward_only=False))
    return schedule
