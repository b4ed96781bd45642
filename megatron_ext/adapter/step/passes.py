"""Passes of a step on one rank: everything that the executor needs to run them.

The executor knows no models. It gets this rank's stages, the transport of messages, and owners,
which are objects by which features run further kinds of actions. Only this module knows all of
these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from operator import methodcaller
from typing import Any

from megatron_ext.adapter.observers.observer import Step
from megatron_ext.adapter.splitting import splitting
from megatron_ext.adapter.step.gradients import no_grad_sync
from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.adapter.step.parameter_gathers import ParameterGathers, parameter_gathers
from megatron_ext.adapter.step.step_hooks import one_of
from megatron_ext.runtime.executor import execute
from megatron_ext.schedule.schedule import followed_by_own_w, recomputed


def run_passes(step: Step) -> list[ModelStage]:
    """Run all passes of a step on this rank, and return the rank's stages."""
    call, program, hooks = step.call, step.program, step.hooks
    boundary, iterators = step.boundary, call.iterators
    if call.varies_by is not None:
        boundary = replace(boundary, shape=None)
    for feature in hooks:
        boundary, iterators = feature.boundary(boundary), feature.iterators(iterators)
    transport = step.connections.transport(program, boundary)
    row = program.schedule.rows[call.pipeline.rank()]
    chunks = dict(zip(_numbers(step), call.models, strict=True))
    gathers = parameter_gathers(call.config, chunks, row, call.forward_only)
    stages = _stages(step, iterators, gathers, followed_by_own_w(row), recomputed(row))
    owners = [owner for feature in hooks for owner in feature.owners(stages, boundary)]
    ends = one_of(hooks, lambda feature: feature.ends)
    context = one_of(hooks, lambda feature: feature.context)
    gathers.begin()
    with no_grad_sync(call), splitting(step.split), contextlib.ExitStack() as around:
        for feature in hooks:
            around.enter_context(feature.around())
        execute(program, stages, transport, step.recorder, owners, ends, context)
    return list(stages.values())


def _numbers(step: Step) -> tuple[int, ...]:
    """Return the numbers of this rank's stages, in the order of its chunks."""
    return step.program.schedule.placement.stages_of[step.call.pipeline.rank()]


def _stages(
    step: Step,
    iterators: list[Any],
    gathers: ParameterGathers,
    followed: Collection[tuple[int, int]],
    recomputed: Collection[tuple[int, int]],
) -> dict[int, ModelStage]:
    call, placement = step.call, step.program.schedule.placement
    stages: dict[int, ModelStage] = {}
    for number, chunk, iterator in zip(_numbers(step), call.models, iterators, strict=True):
        microbatches = [
            {microbatch for stage, microbatch in passes if stage == number}
            for passes in (followed, recomputed)
        ]
        make = one_of(step.hooks, methodcaller("stage_class", number)) or ModelStage
        stages[number] = make(
            *(number, chunk, call.config, iterator, call, step.recorder, gathers, *microbatches),
            has_loss=placement.is_last(number),
            first_trained_stage=step.program.problem.first_trained_stage,
        )
    return stages
