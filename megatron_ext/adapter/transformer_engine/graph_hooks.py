"""Hooks of CUDA graphs: of layers (--cuda-graph-impl transformer_engine), and of whole steps.

Graphs are replayed in the order in which they were captured, so each step is checked against it,
and tensors in their memory are announced to the split of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, override

from megatron_ext.adapter.splitting import Split
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.connections import Connections
from megatron_ext.adapter.step.step_hooks import StepHooks
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.adapter.transformer_engine.captured import captures, is_one_graph, left_to_w
from megatron_ext.adapter.transformer_engine.layer_graphs import layer_graphs
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig
from megatron_ext.runtime.weight_gradients import Lent


class LayerGraphsHooks(TrainingHooks):
    """Hooks that check that steps run in the order in which layers' CUDA graphs were captured."""

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return captures(settings)

    @override
    def log_lines(self, call: Call) -> Sequence[str]:
        splits = self._programs.resolved_spec.traits.splits_backward
        return [left_to_w(call.config)] if splits else []

    @override
    def begin(self, call: Call, program: Program, connections: Connections) -> StepHooks | None:
        if call.forward_only:
            return None
        rank, schedule = call.pipeline.rank(), program.schedule
        stages = schedule.placement.stages_of[rank]
        return _CapturedStep(layer_graphs.begin(schedule.rows[rank], stages, call.models))

    @override
    def end(self) -> None:
        layer_graphs.forget()


class WholeGraphHooks(TrainingHooks):
    """Hooks of one CUDA graph of all passes of a step (--cuda-graph-impl full_iteration).

    During the step the host may neither wait for its device nor query it.
    """

    limits_host = False

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return is_one_graph(settings)


class _CapturedStep(StepHooks):
    def __init__(self, is_lent: Lent) -> None:
        self._is_lent = is_lent

    @override
    def split(self, split: Split) -> Split:
        return replace(split, is_lent=self._is_lent)
