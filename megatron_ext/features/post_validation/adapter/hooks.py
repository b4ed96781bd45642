"""Hooks of post-validation: steps that begin before the previous one is validated.

A rank's optimizer step needs the norm of all ranks' gradients, for which the rank would wait. With
this feature the rank uses the norm of the ranks before it, and learns during the next step whether
its optimizer step was right. The hooks connect the ranks for that, and let the next step restart if
it was not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, override

from torch import Tensor

from megatron_ext.adapter.step.call import Call, refuse_varying_shapes
from megatron_ext.adapter.step.connections import Connections
from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.adapter.step.step_hooks import StepHooks
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.adapter.training_globals import current_iteration
from megatron_ext.compile.overlap import check_overlaps
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig
from megatron_ext.features.post_validation.adapter.commit_points import why_no_steps_overlap
from megatron_ext.features.post_validation.adapter.pending import post_validation
from megatron_ext.features.post_validation.adapter.restartable_step import (
    SpeculativeStep,
    connect_validation,
)
from megatron_ext.features.post_validation.refusals import POST_VALIDATION_REFUSALS
from megatron_ext.observe.launch_remark import LaunchRemark
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.owner import Owner


class PostValidationHooks(TrainingHooks):
    """Hooks for post-validation: its messages, and the optimizer that can roll back."""

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return POST_VALIDATION_REFUSALS.may_be_on(ours)

    @override
    @classmethod
    def remarks(cls, args: Any) -> Sequence[LaunchRemark]:
        why = why_no_steps_overlap(args)
        return [] if why is None else [LaunchRemark("post-validation", why)]

    @override
    @classmethod
    def check_program(cls, args: Any, program: Program) -> None:
        check_overlaps(program)

    @override
    def check_call(self, call: Call) -> None:
        if call.has_own_communicator:
            raise ValueError(
                "--pipeline-post-validation is for Megatron's own training loop, and this caller "
                "has a p2p_communicator of its own; drop the flag"
            )
        refuse_varying_shapes(call, "post-validation")

    @override
    def before_evaluation(self) -> None:
        post_validation.commit_or_rollback()

    @override
    def connect(self, call: Call, program: Program, connections: Connections) -> None:
        placement = program.schedule.placement
        connect_validation(call.pipeline, placement, connections.recorder, call.models)

    @override
    def begin(self, call: Call, program: Program, connections: Connections) -> StepHooks | None:
        if call.forward_only:
            return None
        if current_iteration() is None:
            raise ValueError(
                "--pipeline-post-validation is for Megatron's own training loop, which does not "
                "run here: drop the flag"
            )
        return _SpeculativeHooks(call)

    @override
    def end(self) -> None:
        post_validation.disconnect()


class _SpeculativeHooks(StepHooks):
    def __init__(self, call: Call) -> None:
        self._call = call
        self._step = SpeculativeStep(post_validation, call.iterators)

    @override
    def iterators(self, iterators: list[Any]) -> list[Any]:
        return self._step.iterators

    @override
    def owners(self, stages: Mapping[int, ModelStage], boundary: Boundary) -> Sequence[Owner]:
        return [self._step]

    @override
    def after_passes(self, tokens: Tensor) -> Tensor | None:
        return self._step.defer_scaling(tokens, self._call.models, self._call.groups)
