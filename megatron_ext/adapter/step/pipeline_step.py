"""One step of training or evaluation under our schedule, as Megatron's schedule functions run one.

It takes the same arguments, uses Megatron's forward_step and backward_step, and ends as stock ends:
embedding gradients, finalize_model_grads, timers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config, log_single_rank
from torch import Tensor

from megatron_ext.adapter.observers.observer import Step, StepObserver
from megatron_ext.adapter.observers.profile import StepProfile
from megatron_ext.adapter.observers.split_report import SplitReport
from megatron_ext.adapter.observers.trace import StepTrace
from megatron_ext.adapter.observers.writers import current_iteration
from megatron_ext.adapter.post_validation.pending import post_validation
from megatron_ext.adapter.post_validation.step import SpeculativeStep, connect_validation
from megatron_ext.adapter.programs import Programs, Shape
from megatron_ext.adapter.splitting import Split, head_weights
from megatron_ext.adapter.step.call import Call, groups_of, refuse_call
from megatron_ext.adapter.step.connections import Connections, connect
from megatron_ext.adapter.step.gradients import finalize_gradients, tokens_of
from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.adapter.step.passes import run_passes
from megatron_ext.adapter.tied import refuse_different_copies
from megatron_ext.adapter.vocabulary_rows import shard_of
from megatron_ext.config import PipelineConfig
from megatron_ext.logger import logger
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.schedule.build.output_layer import output_layer_waits
from megatron_ext.schedule.problem import VocabularyParallel
from megatron_ext.schedule.program.verify import Program
from megatron_ext.schedule.show.program_summary import summarize


class PipelineStep:
    """Runs steps under one configured schedule. Lives as long as the training does."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._divides = config.vocab_parallel is not VocabularyParallel.NONE
        self._programs = Programs(config)
        self._observers = _observers(config, self._programs)
        self._connections: Connections | None = None
        self._calls = 0

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: P2PCommunicator | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """One step, with the arguments and the result of Megatron's schedule functions."""
        models = model if isinstance(model, list) else [model]
        config = get_model_config(models[0])
        refuse_call(
            self._config,
            config,
            adjust_tensor_shapes_fn,
            collect_non_loss_data,
            p2p_communicator,
            pg_collection,
        )
        if forward_only:
            post_validation.settle()
        pipeline, groups = groups_of(p2p_communicator, pg_collection)
        call = Call(
            forward_step_func=forward_step_func,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            force_all_reduce=force_all_reduce,
            context_parallel_size=groups.cp.size(),
            config=config,
            models=models,
            iterators=data_iterator if isinstance(data_iterator, list) else [data_iterator],
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            pipeline=pipeline,
            groups=groups,
        )
        return self._run(call)

    def finish(self, iteration: int) -> None:
        """The training has ended with ``iteration``."""
        for observer in self._observers:
            observer.finish(iteration)

    def _run(self, call: Call) -> list[Any]:
        shape = None
        if self._config.costs.profile is not None and not call.config.variable_seq_lengths:
            shape = call.micro_batch_size, call.seq_length
        self._programs.agree_on_costs(
            call.pipeline, call.config, call.models, shape, call.seq_length, call.micro_batch_size
        )
        program = self._program(call, shape)
        connections = self._connections
        assert connections is not None
        self._calls += 1
        connections.recorder.begin(current_iteration() or self._calls)
        with connections.heard_if_it_fails("a step, beside its passes"):
            step = self._step(call, connections, program, shape)
            return _evaluate(step) if call.forward_only else self._train(step)

    def _train(self, step: Step) -> list[Any]:
        call, speculative, others = step.call, None, []
        iterators = call.iterators
        if self._config.post_validation:
            speculative = SpeculativeStep(post_validation, iterators)
            iterators, others = speculative.iterators, [speculative]
        with _timed(call.config):
            for observer in self._observers:
                observer.begin(step)
            stages = run_passes(step, iterators, others)
            tokens = tokens_of(call, stages)
            if tokens is not None and speculative is not None:
                tokens = speculative.put_off_scaling(tokens, call.models, call.groups)
            finalize_gradients(call, tokens)
        for observer in self._observers:
            observer.end(step)
        step.connections.recorder.end()
        return _losses(stages)

    def _step(self, call: Call, connections: Connections, program: Program, shape: Shape) -> Step:
        shard, at_once = None, frozenset[Tensor]()
        if self._divides:
            shard = shard_of(call.models, call.config, call.pipeline, call.groups.tp)
        elif not output_layer_waits(program):
            at_once = head_weights(call.models)
        waits = self._config.choice.splits_backward and not call.forward_only
        apart = frozenset[Tensor]() if shard is None else frozenset([shard.output])
        split = Split(waits, at_once, apart)
        return Step(call, connections, program, shape, call.boundary(), shard, split)

    def _program(self, call: Call, shape: Shape) -> Program:
        """The program for this step, the same on every rank of the job; cached."""
        asked = call.config, shape, call.num_microbatches, call.forward_only
        known = self._programs.known(*asked)
        if known is not None:
            return known
        if self._connections is None:
            refuse_different_copies(call.pipeline, call.models)
            program = self._programs.make(call.pipeline, *asked)
            self._connections = self._connect(call, program)
        else:  # ranks may differ, and some not see it
            with self._connections.heard_if_it_fails("the making of a program", RuntimeError):
                program = self._programs.make(call.pipeline, *asked)
        if not call.forward_only:
            log_single_rank(logger, logging.INFO, summarize(program))
        self._connections.expect(program, varies=call.config.variable_seq_lengths)
        return program

    def _connect(self, call: Call, program: Program) -> Connections:
        connections = connect(self._config, program, call.pipeline)
        if self._config.post_validation:
            placement, recorder = program.schedule.placement, connections.recorder
            connect_validation(call.pipeline, placement, recorder, call.models)
        Watchdog(connections.recorder).start()
        connections.listen()
        return connections


def _evaluate(step: Step) -> list[Any]:
    with _timed(step.call.config):
        stages = run_passes(step, step.call.iterators)
    return _losses(stages)


def _losses(stages: Sequence[ModelStage]) -> list[Any]:
    return [loss for stage in stages for loss in stage.losses]


def _observers(config: PipelineConfig, programs: Programs) -> list[StepObserver]:
    observers: list[StepObserver] = []
    if config.report_split:
        observers.append(SplitReport())
    if config.trace is not None and config.trace_iters is not None:
        overlap = config.post_validation
        observers.append(StepTrace(config.trace, config.trace_iters, overlap=overlap))
    if (path := config.costs.profile) is not None:
        observers.append(StepProfile(path, programs))
    return observers


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Within, Megatron's own timer of a step runs."""
    if config.timers is None:
        yield
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers("forward-backward").stop()
