"""State shared by the steps of one training, and the execution of one of them.

A process may train more than once: it destroys its process groups, makes new ones and restarts, as
Megatron's --inprocess-restart does. The state of a training ends with its groups.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.utils import log_single_rank
from torch import Tensor

from megatron_ext.adapter.observers.observer import Step, StepObserver, of_all_steps
from megatron_ext.adapter.observers.split_report import SplitReport
from megatron_ext.adapter.observers.step_metrics import StepMetrics
from megatron_ext.adapter.observers.step_profile import StepProfile, costs_path
from megatron_ext.adapter.observers.step_trace import StepTrace
from megatron_ext.adapter.pairs.callers import refuse_unplanned
from megatron_ext.adapter.pairs.overlap_setting import requests_pairs
from megatron_ext.adapter.post_validation.pending import post_validation
from megatron_ext.adapter.post_validation.restartable_step import (
    SpeculativeStep,
    connect_validation,
)
from megatron_ext.adapter.programs import BatchShape, Programs
from megatron_ext.adapter.race.step_race import StepRace
from megatron_ext.adapter.slices.context_parallel import connect_sharing
from megatron_ext.adapter.slices.known_models import refuse_unknown
from megatron_ext.adapter.slices.lengths import spans_of
from megatron_ext.adapter.splitting import Split, head_weights
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.callers_hooks import CallersHooks, callers_hooks, tell_of_hooks
from megatron_ext.adapter.step.connections import Connections, connect
from megatron_ext.adapter.step.gradients import finalize_gradients, token_count
from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.adapter.step.passes import run_passes
from megatron_ext.adapter.step.token_shifts import connect_token_shifts
from megatron_ext.adapter.tied import refuse_different_copies
from megatron_ext.adapter.training_globals import (
    current_iteration,
    restarts_in_process,
    training_global,
)
from megatron_ext.adapter.transformer_engine.captured import captures, left_to_w
from megatron_ext.adapter.transformer_engine.layer_graphs import layer_graphs
from megatron_ext.adapter.vocabulary_rows import shard_of
from megatron_ext.compile.output_layer import output_layer_waits
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig
from megatron_ext.logger import logger
from megatron_ext.runtime.host.host_memory import ShortOfHostMemory
from megatron_ext.runtime.interruption import heard_if_it_fails, listen, stop_listening
from megatron_ext.runtime.messages.connecting import connecting
from megatron_ext.runtime.messages.transport import closed
from megatron_ext.runtime.rank_identity import first_identity, rank_identity
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.slices.running_slice import Span
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.runtime.weight_gradients import Lent, is_owned
from megatron_ext.schedule.costs_text import format_costs
from megatron_ext.schedule.dealing import MicrobatchOrder
from megatron_ext.schedule.problem import VocabularyParallel
from megatron_ext.viz.program_summary import summarize


class PipelineTraining:
    """Steps of one schedule over one set of process groups."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._divides = config.vocab_parallel is not VocabularyParallel.NONE
        self._programs = Programs(config)
        self._race = None if config.race is None else StepRace(config, self._programs)
        self._observers = _observers(config, self._programs)
        self._observers += [] if self._race is None else [self._race]
        self._recorder: Recorder | None = None  # from the first step on
        self._connections: Connections | None = None
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()  # first chunks of models
        self._calls = 0
        self._world = dist.group.WORLD
        self._has_ended = False
        _trainings.add(self)

    @property
    def is_over(self) -> bool:
        """Whether the process groups of this training are gone."""
        return self._has_ended or self._world is not dist.group.WORLD

    def end(self) -> None:
        """Release everything of this training: its process groups are gone, or about to be
        destroyed."""
        self._has_ended = True
        recorder, self._recorder, self._connections = self._recorder, None, None
        if recorder is not None:
            stop_listening(recorder)
            Watchdog.forget(recorder)
        post_validation.disconnect()
        layer_graphs.forget()

    def finish(self, iteration: int) -> None:
        """Finish after the last iteration, ``iteration``."""
        for observer in self._observers:
            observer.finish(iteration)

    def interrupt(self) -> None:
        """Note that other work takes place between two steps and belongs to neither."""
        if self._race is not None:
            self._race.interrupt()

    def run(self, call: Call) -> list[Any]:
        """Run one step, with the result of Megatron's schedule functions."""
        recorder = self._recorder or self._begin(call.pipeline)
        try:
            return self._run(call, recorder)
        finally:
            recorder.leave()

    def _run(self, call: Call, recorder: Recorder) -> list[Any]:
        if recorder.has_failed and self._connections is None:
            raise closed(recorder.rank)
        if call.forward_only:
            post_validation.commit_or_rollback()
            self.interrupt()
        shape = None
        if self._config.costs.profile is not None and not call.config.variable_seq_lengths:
            shape = call.micro_batch_size, call.seq_length
        self._programs.agree_on_costs(
            call.pipeline,
            call.config,
            call.models,
            shape,
            call.seq_length,
            call.micro_batch_size,
            call.num_microbatches,
            call.forward_only,
        )
        if self._race is not None and not call.forward_only:
            with self._heard_if_it_fails("the race"):
                make = partial(self._program, call, shape)
                self._race.choose(call, shape, make, self._connections)
        with self._heard_if_it_fails("the making of a program", ShortOfHostMemory):
            program = self._program(call, shape)
        connections = self._connections
        assert connections is not None
        self._calls += 1
        recorder.begin(current_iteration() or self._calls)
        with heard_if_it_fails(recorder, "a step, outside its passes"):
            step = self._step(call, connections, program, shape)
            return _evaluate(step) if call.forward_only else self._train(step)

    def _train(self, step: Step) -> list[Any]:
        call, speculative, others = step.call, None, []
        iterators = call.iterators
        if self._config.post_validation:
            if current_iteration() is None:
                raise ValueError(
                    "--pipeline-post-validation is for Megatron's own training loop, which does "
                    "not run here: drop the flag"
                )
            speculative = SpeculativeStep(post_validation, iterators)
            iterators, others = speculative.iterators, [speculative]
        with _timed(call.config):
            for observer in self._observers:
                observer.begin(step)
            stages = run_passes(step, iterators, others)
            tokens = token_count(call, stages)
            if tokens is not None and speculative is not None:
                tokens = speculative.defer_scaling(tokens, call.models, call.groups)
            finalize_gradients(call, tokens)
        for observer in self._observers:
            observer.end(step)
        step.recorder.end()
        return _losses(stages)

    def _step(
        self, call: Call, connections: Connections, program: Program, shape: BatchShape
    ) -> Step:
        shard, at_once = None, frozenset[Tensor]()
        if self._divides:
            shard = shard_of(call.models, call.config, call.pipeline, call.groups.tp)
        elif not output_layer_waits(program):
            at_once = head_weights(call.models)
        waits = self._programs.resolved_spec.traits.splits_backward and not call.forward_only
        needs_hooks = waits or (self._config.slices > 1 and not call.forward_only)
        hooks = callers_hooks(call.models) if needs_hooks else CallersHooks()
        if waits:
            tell_of_hooks(call.models, hooks)
        separate_weights = frozenset[Tensor]() if shard is None else frozenset([shard.output])
        is_lent: Lent = is_owned
        if captures(call.config) and not call.forward_only:
            rank, schedule = call.pipeline.rank(), program.schedule
            stages = schedule.placement.stages_of[rank]
            is_lent = layer_graphs.begin(schedule.rows[rank], stages, call.models)
        split = Split(waits, hooks, at_once, separate_weights, is_lent)
        return Step(
            pipeline=call.pipeline,
            program=program,
            recorder=connections.recorder,
            call=call,
            connections=connections,
            shape=shape,
            boundary=call.boundary(),
            shard=shard,
            split=split,
            spans=self._spans(call, program),
        )

    def _spans(self, call: Call, program: Program) -> tuple[Span, ...]:
        tokens = call.decoder_seq_length or call.seq_length
        return spans_of(program, call.config, tokens, call.groups.cp.rank())

    def _program(self, call: Call, shape: BatchShape) -> Program:
        """Return the program of this step, the same on every rank of the job; cached."""
        first_trained_stage = 0
        if not (call.forward_only or self._divides):
            first_trained_stage = self._programs.first_trained_stage(call.pipeline, call.models)
        self._check_models(call)
        request = call.config, shape, call.num_microbatches, call.forward_only, first_trained_stage
        known = self._programs.known(*request)
        if known is not None:
            if self._connections is not None and not call.forward_only:
                with self._heard_if_it_fails("the swap of a program", RuntimeError):
                    self._programs.check_swap(call.pipeline, call.config, shape, known)
            return known
        if requests_pairs(call.config) and not call.forward_only:
            refuse_unplanned(call)
        if self._connections is None:
            program = self._programs.make(call.pipeline, *request)
            assert self._recorder is not None
            with heard_if_it_fails(self._recorder, "the connecting of the ranks"):
                self._connections = self._connect(call, program, self._recorder)
        else:  # ranks may differ, and not all of them may notice
            with self._heard_if_it_fails("the making of a program", RuntimeError):
                program = self._programs.make(call.pipeline, *request)
        if not call.forward_only:
            log_single_rank(logger, logging.INFO, summarize(program))
            costs = format_costs(program.problem.costs)
            log_single_rank(logger, logging.DEBUG, f"costs of each stage: {costs}")
            if captures(call.config) and self._programs.resolved_spec.traits.splits_backward:
                log_single_rank(logger, logging.INFO, left_to_w(call.config))
        try:
            self._connections.expect(program)
        except ShortOfHostMemory:
            self._programs.forget(program)
            raise
        return program

    def _check_models(self, call: Call) -> None:
        """Check the models of ``call`` when they come for the first time: a process may train more
        than one, such as an actor and a critic. Collective over the pipeline then."""
        if call.models[0] in self._checked:
            return
        with self._heard_if_it_fails("the check of a model"):
            if self._config.options.slices.count > 1:
                refuse_unknown(call.models)
            refuse_different_copies(call.pipeline, call.models)
            if self._connections is not None:  # connections of the first model include its own
                connect_token_shifts(call.models, call.groups.cp)
        self._checked.add(call.models[0])

    def _heard_if_it_fails(
        self, where: str, kind: type[BaseException] = BaseException
    ) -> AbstractContextManager[None]:
        """Context in which an error of this ``kind`` ends the other ranks too, if they are
        connected."""
        if self._connections is None:
            return contextlib.nullcontext()
        return heard_if_it_fails(self._connections.recorder, where, kind)

    def _begin(self, pipeline: dist.ProcessGroup) -> Recorder:
        """Watch this rank, and listen for failures of others, before anything is connected. Then
        the ranks of ``pipeline`` exchange who they are; collective over them."""
        recorder = self._recorder = Recorder(pipeline.rank(), first_identity(pipeline))
        Watchdog(recorder).start()
        if not restarts_in_process():  # otherwise the restarting wrapper reports failures
            report = listen(recorder)
            if report is not None:
                weakref.finalize(self, report.stop)
        with connecting(recorder, pipeline, "of the pipeline"):
            recorder.rank_identity = rank_identity(pipeline)
        return recorder

    def _connect(self, call: Call, program: Program, recorder: Recorder) -> Connections:
        connections = connect(self._config, program, call.pipeline, recorder)
        if (sharing := call.groups.cp).size() > 1:
            with connecting(recorder, sharing, "of context parallelism"):
                connect_token_shifts(call.models, sharing)
                if self._config.slices > 1:
                    connect_sharing(sharing)
        if self._config.post_validation:
            placement = program.schedule.placement
            connect_validation(call.pipeline, placement, recorder, call.models)
        return connections


_trainings: weakref.WeakSet[PipelineTraining] = weakref.WeakSet()


def end_trainings() -> None:
    """End all trainings of this process: its process groups are being destroyed."""
    for training in list(_trainings):
        training.end()


def _evaluate(step: Step) -> list[Any]:
    with _timed(step.call.config):
        stages = run_passes(step, step.call.iterators)
    return _losses(stages)


def _losses(stages: Sequence[ModelStage]) -> list[Any]:
    return [loss for stage in stages for loss in stage.losses]


def _observers(config: PipelineConfig, programs: Programs) -> list[StepObserver[Step]]:
    observers: list[StepObserver[Step]] = [*of_all_steps]
    if config.report_split:
        observers.append(SplitReport(splits=config.splits_backward))
    if config.metrics:
        observers.append(StepMetrics(overlap=config.post_validation))
    if config.trace is not None:
        overlap = config.post_validation
        observers.append(StepTrace(config.trace, config.trace_iters, overlap=overlap))
    if (path := costs_path(config, training_global("_GLOBAL_ARGS"))) is not None:
        by_place = config.microbatch_order is not MicrobatchOrder.ARRIVAL
        observers.append(StepProfile(path, programs, by_place=by_place))
    return observers


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Context in which Megatron's own timer of a step runs."""
    if config.timers is None:
        yield
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers("forward-backward").stop()
