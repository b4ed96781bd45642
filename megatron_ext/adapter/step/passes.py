"""Passes of a step on one rank: its stages and the other owners, assembled for the executor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_ext.adapter.observers.observer import Step
from megatron_ext.adapter.pairs.callers import takes_plans
from megatron_ext.adapter.pairs.planned_stage import PlannedStage
from megatron_ext.adapter.slices.lengths import lengths_passed_on
from megatron_ext.adapter.splitting import splitting
from megatron_ext.adapter.step.end_stage import EndStage, ends_of
from megatron_ext.adapter.step.gradients import no_grad_sync
from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.adapter.step.parameter_gathers import ParameterGathers, parameter_gathers
from megatron_ext.adapter.step.sliced_stage import SlicedStage
from megatron_ext.adapter.vocabulary_rows import await_tables
from megatron_ext.runtime.executor import execute
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.owner import Owner
from megatron_ext.runtime.slices.running_slice import running_slice
from megatron_ext.runtime.vocabulary.vocabulary_passes import VocabularyPasses
from megatron_ext.schedule.schedule import followed_by_own_w, recomputed


def run_passes(step: Step, iterators: list[Any], others: Sequence[Owner] = ()) -> list[ModelStage]:
    """Run all passes on data from ``iterators``, one per chunk, and return the stages.

    ``others`` own the program's kinds of action that are not handled here.
    """
    call, connections, program = step.call, step.connections, step.program
    boundary = step.boundary
    if call.varies_by is not None:
        boundary = replace(boundary, shape=None)
    if step.spans:
        boundary = replace(boundary, lengths=lengths_passed_on(boundary, step.spans))
    transport = connections.transport(program, boundary)
    row = program.schedule.rows[call.pipeline.rank()]
    chunks = dict(zip(_numbers(step), call.models, strict=True))
    gathers = parameter_gathers(call.config, chunks, row, call.forward_only)
    stages = _stages(step, iterators, gathers, followed_by_own_w(row), recomputed(row))
    vocabulary = _vocabulary(step, stages, boundary)
    offload = None
    if connections.offload is not None and not call.forward_only:
        offload = connections.offload.step(row)
    gathers.begin()
    if step.shard is not None:
        await_tables(call.models)
    slices = running_slice.step(step.spans, call.groups.cp)
    with no_grad_sync(call), splitting(step.split), slices:
        owners = [*(owner for owner in (vocabulary, offload) if owner is not None), *others]
        execute(program, stages, transport, step.recorder, owners, vocabulary, offload)
    return list(stages.values())


def _numbers(step: Step) -> tuple[int, ...]:
    """Return the stages of this rank, by chunk."""
    return step.program.schedule.placement.stages_of[step.call.pipeline.rank()]


def _stages(
    step: Step,
    iterators: list[Any],
    gathers: ParameterGathers,
    followed: Collection[tuple[int, int]],
    recomputed: Collection[tuple[int, int]],
) -> dict[int, ModelStage]:
    call, placement = step.call, step.program.schedule.placement
    first_trained_stage = step.program.problem.first_trained_stage
    stages: dict[int, ModelStage] = {}
    asks = step.program.problem.options.pairs and not call.forward_only
    is_planned = asks and takes_plans(call.forward_step_func)
    for number, chunk, iterator in zip(_numbers(step), call.models, iterators, strict=True):
        is_last = placement.is_last(number)
        microbatches = [
            {microbatch for stage, microbatch in passes if stage == number}
            for passes in (followed, recomputed)
        ]
        common = number, chunk, call.config, iterator, call, step.recorder, gathers, *microbatches
        if step.spans:
            stages[number] = SlicedStage(
                *common,
                spans=step.spans,
                hooked=step.split.hooks.parameters,
                is_last=is_last,
                first_trained_stage=first_trained_stage,
            )
        elif step.shard is not None and (placement.is_first(number) or is_last):
            stages[number] = EndStage(*common, is_last=is_last)
        else:
            stage = PlannedStage if is_planned else ModelStage
            stages[number] = stage(
                *common, has_loss=is_last, first_trained_stage=first_trained_stage
            )
    return stages


def _vocabulary(
    step: Step, stages: Mapping[int, ModelStage], boundary: Boundary
) -> VocabularyPasses | None:
    if step.shard is None:
        return None
    assert step.connections.collectives is not None
    return VocabularyPasses(
        step.program,
        ends_of(stages.values()),
        step.shard,
        step.connections.collectives,
        boundary,
        step.call.tokens_shape,
        step.recorder,
    )
