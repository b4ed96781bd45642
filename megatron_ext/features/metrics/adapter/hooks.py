"""Hooks of metrics (``--pipeline-metrics``): an observer of steps, ours and Megatron's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, override

from megatron_ext.adapter.observers.observer import ObservedStep, Step, StepObserver
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.config import PipelineConfig
from megatron_ext.features.metrics.adapter.step_metrics import StepMetrics
from megatron_ext.features.metrics.refusals import METRICS_REFUSALS


class MetricsHooks(TrainingHooks):
    """Hooks that log metrics of training steps (``--pipeline-metrics``)."""

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return METRICS_REFUSALS.may_be_on(ours)

    @override
    def observers(self) -> Sequence[StepObserver[Step]]:
        return [StepMetrics(overlap=self._config.options.steps_overlap)]

    @override
    @classmethod
    def stock_observers(cls, ours: PipelineConfig) -> Sequence[StepObserver[ObservedStep]]:
        return [StepMetrics(overlap=False)] if ours.metrics else []
