"""From a choice to a program: family, transforms, proof."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.schedule.registry import Choice
from megatron_ext.schedule.schedule import P2P, Problem, Transform
from megatron_ext.schedule.transforms.batches import batch_messages
from megatron_ext.schedule.transforms.communication import communicate
from megatron_ext.schedule.transforms.forward_only import keep_forward
from megatron_ext.schedule.transforms.waits import await_sends
from megatron_ext.schedule.verify import Program, check_compute, prove


def build_program(choice: Choice, problem: Problem) -> Program:
    """The proved program of ``choice`` for ``problem``.

    Raises:
        InvalidSchedule: the schedule does not solve the problem, or not within its memory limit.
    """
    transforms: list[Transform] = [communicate, await_sends]
    if problem.forward_only:
        transforms.insert(0, keep_forward)
    if problem.p2p is P2P.BATCHED:
        transforms.insert(transforms.index(await_sends), batch_messages)
    schedule = choice.build(problem)
    check_compute(schedule, replace(problem, forward_only=False))
    for transform in transforms:
        schedule = transform(schedule, problem)
    return prove(schedule, problem)
