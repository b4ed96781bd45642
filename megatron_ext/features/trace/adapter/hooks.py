"""Hooks of a trace (``--pipeline-trace``): an observer of the traced iterations.

A trace that could not be written, or of iterations that will not run, is refused before the
training begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, override

from megatron_ext.adapter.observers.observer import ObservedStep, Step, StepObserver
from megatron_ext.adapter.observers.written_folder import make_folder
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.config import PipelineConfig
from megatron_ext.features.trace.adapter.step_trace import StepTrace
from megatron_ext.features.trace.refusals import TRACE_REFUSALS
from megatron_ext.observe.trace import TRACED_OF_RUN


class TraceHooks(TrainingHooks):
    """Hooks that trace some iterations of a training (``--pipeline-trace``)."""

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return TRACE_REFUSALS.may_be_on(ours)

    @override
    @classmethod
    def check_arguments(cls, args: Any, ours: PipelineConfig) -> None:
        _check(args, ours)

    @override
    def observers(self) -> Sequence[StepObserver[Step]]:
        config = self._config
        assert config.trace is not None
        return [StepTrace(config.trace, config.trace_iters, overlap=config.options.steps_overlap)]

    @override
    @classmethod
    def stock_observers(cls, ours: PipelineConfig) -> Sequence[StepObserver[ObservedStep]]:
        if ours.trace is None:
            return []
        return [StepTrace(ours.trace, ours.trace_iters, of_stock=True)]


def _check(args: Any, config: PipelineConfig) -> None:
    """Refuse a trace of iterations that will not run, or in a folder that cannot be created.

    Raises:
        ValueError: the iterations or the folder are impossible.
    """
    assert config.trace is not None
    traced, last = config.trace_iters, args.train_iters
    if traced is None and last is not None and last < TRACED_OF_RUN[-1]:
        raise ValueError(
            f"--pipeline-trace {config.trace} traces iterations {TRACED_OF_RUN[0]} to "
            f"{TRACED_OF_RUN[-1]} of a run, and the last iteration is {last} (--train-iters): name "
            "earlier iterations with --pipeline-trace-iters A:B, or train longer"
        )
    if traced is not None and last is not None and traced[-1] > last:
        raise ValueError(
            f"--pipeline-trace-iters {traced.start}:{traced.stop} includes iteration {traced[-1]}, "
            f"and the last iteration is {last} (--train-iters): trace earlier iterations, or train "
            "longer"
        )
    make_folder(config.trace, f"--pipeline-trace {config.trace}: the folder")
