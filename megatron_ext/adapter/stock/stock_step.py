"""Step under Megatron's own pipeline functions, observed.

They run unchanged, with the same arguments: there is no watchdog, and no message of ours within a
step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection
from megatron.core.utils import get_model_config, log_single_rank

from megatron_ext.adapter.features import FEATURES, requested_options
from megatron_ext.adapter.job import basis_of
from megatron_ext.adapter.observers.observer import (
    ObservedStep,
    StepObserver,
    StocksStep,
    of_all_steps,
)
from megatron_ext.adapter.programs import Programs
from megatron_ext.adapter.stock.predicted_parts import model_parts_of
from megatron_ext.adapter.stock.stock_order import family_of, why_unseen
from megatron_ext.adapter.stock.stock_passes import StockPasses, watching
from megatron_ext.adapter.training_globals import current_iteration
from megatron_ext.base.logger import logger
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig
from megatron_ext.observe.fitted_parts import ModelParts
from megatron_ext.runtime.device_progress import unhindered
from megatron_ext.runtime.rank_identity import rank_identity
from megatron_ext.runtime.recorder import Recorder


@dataclass(frozen=True)
class StockStep:
    """Stand-in for a pipeline ``function`` of Megatron's, which lets observers see its steps."""

    function: Callable[..., Any]
    stock: WatchedStock

    def __call__(self, **arguments: Any) -> Any:
        """Observe one training step, and return the result of ``function``."""
        if arguments.get("forward_only"):
            return self.function(**arguments)
        return self.stock.current_training().run(self.function, arguments)

    def finish(self, iteration: int) -> None:
        """Tell the observers that the training ends after ``iteration``."""
        self.stock.current_training().finish(iteration)


class WatchedStock:
    """Observation of Megatron's pipeline functions, for one training after another."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._training: StockTraining | None = None

    def step(self, function: Callable[..., Any]) -> StockStep:
        """Return the stand-in to call in place of ``function``."""
        return StockStep(function, self)

    def current_training(self) -> StockTraining:
        if self._training is None or self._training.is_over:
            self._training = StockTraining(self._config)
        return self._training


class StockTraining:
    """Observed steps of one training under Megatron's own pipeline functions."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._observers: list[StepObserver[ObservedStep]] = [*of_all_steps]
        for feature in FEATURES:
            self._observers += feature.stock_observers(config)
        # Programs with the order of Megatron's own schedules, by the spec of the schedule.
        self._programs: dict[str, Programs] = {}
        self._parts_by_spec: dict[str, ModelParts | None] = {}
        self._parts: ModelParts | None = None  # model parts of the stages in the running step
        self._recorder: Recorder | None = None
        self._calls = 0
        self._world = dist.group.WORLD
        self._said: set[str] = set()

    @property
    def is_over(self) -> bool:
        """Whether the process groups of this training are gone."""
        return self._world is not dist.group.WORLD

    def run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Run one training step by ``function``, seen by observers, and return its result."""
        step = self._step(function, arguments)
        if step is None:
            return function(**arguments)
        self._calls += 1
        step.recorder.begin(current_iteration() or self._calls)
        for observer in self._observers:
            observer.begin(step)
        with watching(StockPasses(step.recorder, step.program.schedule.placement)):
            result = function(**arguments)
        for observer in self._observers:
            observer.end(step)
        step.recorder.end()
        return result

    def finish(self, iteration: int) -> None:
        """Tell the observers that the training ends after ``iteration``."""
        if self._recorder is None:  # no step was observed, and a log line has said why
            return
        for observer in self._observers:
            observer.finish(iteration)

    def _step(self, function: Callable[..., Any], arguments: dict[str, Any]) -> ObservedStep | None:
        """Return the step to observe; None, with a log line, if it cannot be observed."""
        model = arguments["model"]
        models = model if isinstance(model, list) else [model]
        config = get_model_config(models[0])
        p2p, groups = arguments.get("p2p_communicator"), arguments.get("pg_collection")
        if isinstance(groups, MultiModuleProcessGroupCollection):
            self._say(f"the pipeline holds several models ({type(groups).__name__}), not one")
            return None
        pipeline: dist.ProcessGroup = (
            parallel_state.get_pipeline_model_parallel_group() if p2p is None else p2p.pp_group
        )
        why = why_unseen(pipeline.size(), config)
        if why is not None:
            self._say(why)
            return None
        try:
            program = self._program(function, config, pipeline, models, arguments)
        except ValueError as error:  # a step that Megatron accepts runs unobserved
            self._say(str(error))
            return None
        if self._recorder is None:
            # An observed step does not limit how far the host runs ahead of its device.
            self._recorder = Recorder(pipeline.rank(), rank_identity(pipeline), unhindered())
        return StocksStep(pipeline, program, self._recorder, self._parts)

    def _program(
        self,
        function: Callable[..., Any],
        config: Any,
        pipeline: dist.ProcessGroup,
        models: list[Any],
        arguments: dict[str, Any],
    ) -> Program:
        """Return the program that has the order of passes of Megatron's ``function``.

        The first call is collective over the world.
        """
        spec = family_of(function, config, pipeline.size(), len(models))
        if spec not in self._programs:
            config_of_order = replace(self._config, schedule=spec)
            self._programs[spec] = Programs(
                config_of_order, partial(requested_options, config_of_order), is_stock=True
            )
        programs = self._programs[spec]
        microbatches = arguments["num_microbatches"]
        programs.agree_on_costs(
            pipeline,
            config,
            models,
            None,
            sequence=arguments["seq_length"],
            micro_batch=arguments["micro_batch_size"],
            microbatches=microbatches,
            forward_only=False,
        )
        if spec not in self._parts_by_spec:
            basis = basis_of(programs.described[None]())
            self._parts_by_spec[spec] = None if basis is None else model_parts_of(basis)
        self._parts = self._parts_by_spec[spec]
        key = programs.key(config, None, microbatches)
        return programs.known(key) or programs.make(pipeline, config, key)

    def _say(self, why: str) -> None:
        if why not in self._said:
            log_single_rank(logger, logging.WARNING, f"nothing of Megatron's step is seen: {why}")
        self._said.add(why)
