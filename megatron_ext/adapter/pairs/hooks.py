"""Hooks of overlapped forward and backward passes (--overlap-moe-expert-parallel-comm).

In a step that overlaps passes, each stage is a `PlannedStage`. The request itself comes from
Megatron's flag, not from a setting of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, override

from megatron_ext.adapter.pairs.callers import refuse_unplanned, takes_plans
from megatron_ext.adapter.pairs.overlap_setting import requests_pairs
from megatron_ext.adapter.pairs.planned_stage import PlannedStage
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.connections import Connections
from megatron_ext.adapter.step.step_hooks import StageClass, StepHooks
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig


class OverlapHooks(TrainingHooks):
    """Hooks for overlapped forward and backward passes, which run by Megatron's schedule plans."""

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return requests_pairs(settings)

    @override
    @classmethod
    def requested_options(cls, settings: Any, microbatches: int | None) -> Mapping[str, Any]:
        # A step of one microbatch gets no overlapped passes, since a pass can only overlap a pass
        # of another microbatch. Callers whose batches vary may have such steps.
        return {"pairs": True} if microbatches != 1 else {}

    @override
    def check_new_program(self, call: Call) -> None:
        if not call.forward_only:
            refuse_unplanned(call)

    @override
    def begin(self, call: Call, program: Program, connections: Connections) -> StepHooks | None:
        overlaps = program.problem.options.pairs and not call.forward_only
        return _PlannedStep() if overlaps and takes_plans(call.forward_step_func) else None


class _PlannedStep(StepHooks):
    @override
    def stage_class(self, number: int) -> StageClass:
        return PlannedStage
