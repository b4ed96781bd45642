"""Hooks of the features that observe steps and take no other part in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, override

from megatron_ext.adapter.observers.file_checks import check_profile, check_trace
from megatron_ext.adapter.observers.observer import ObservedStep, Step, StepObserver
from megatron_ext.adapter.observers.step_metrics import StepMetrics
from megatron_ext.adapter.observers.step_profile import StepProfile, costs_path
from megatron_ext.adapter.observers.step_trace import StepTrace
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.adapter.training_globals import training_global
from megatron_ext.config import PipelineConfig
from megatron_ext.schedule.dealing import MicrobatchOrder


class MetricsHooks(TrainingHooks):
    """Metrics of steps in the training's log."""

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return ours.metrics

    @override
    def observers(self) -> Sequence[StepObserver[Step]]:
        return [StepMetrics(overlap=self._config.post_validation)]

    @override
    @classmethod
    def stock_observers(cls, ours: PipelineConfig) -> Sequence[StepObserver[ObservedStep]]:
        return [StepMetrics(overlap=False)] if ours.metrics else []


class TraceHooks(TrainingHooks):
    """Trace of some iterations."""

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return ours.trace is not None

    @override
    @classmethod
    def check_arguments(cls, args: Any, ours: PipelineConfig) -> None:
        check_trace(args, ours)

    @override
    def observers(self) -> Sequence[StepObserver[Step]]:
        config = self._config
        assert config.trace is not None
        return [StepTrace(config.trace, config.trace_iters, overlap=config.post_validation)]

    @override
    @classmethod
    def stock_observers(cls, ours: PipelineConfig) -> Sequence[StepObserver[ObservedStep]]:
        if ours.trace is None:
            return []
        return [StepTrace(ours.trace, ours.trace_iters, of_stock=True)]


class ProfileHooks(TrainingHooks):
    """Costs measured in the first steps, and a program for them."""

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return ours.costs.profile is not None

    @override
    @classmethod
    def check_arguments(cls, args: Any, ours: PipelineConfig) -> None:
        check_profile(args, ours)

    @override
    def observers(self) -> Sequence[StepObserver[Step]]:
        path = costs_path(self._config, training_global("_GLOBAL_ARGS"))
        assert path is not None
        by_place = self._config.microbatch_order is not MicrobatchOrder.ARRIVAL
        return [StepProfile(path, self._programs, by_place=by_place)]
