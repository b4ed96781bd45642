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

from megatron_ext.adapter.features import features_of, requested_options
from megatron_ext.adapter.observers.observer import Step, StepObserver, of_all_steps
from megatron_ext.adapter.programs import BatchShape, Programs, log_program
from megatron_ext.adapter.splitting import split_of
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.connections import (
    Connections,
    connect,
    connect_token_shifts,
    refuse_after_failure,
    refuse_other_pipeline,
)
from megatron_ext.adapter.step.gradients import finalize_gradients, token_count
from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.adapter.step.passes import run_passes
from megatron_ext.adapter.step.training_hooks import CannotRun, TrainingHooks
from megatron_ext.adapter.training_globals import current_iteration, restarts_in_process
from megatron_ext.base.logger import logger
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig
from megatron_ext.runtime.interruption import heard_if_it_fails, listen, stop_listening
from megatron_ext.runtime.messages.connecting import exchange_identities
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.watchdog import Watchdog


class PipelineTraining:
    """Training of one schedule over one set of process groups."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._programs = Programs(config, partial(requested_options, config))
        # Hooks of all features that were on in some step.
        self._hooks: dict[type[TrainingHooks], TrainingHooks] = {}
        self._observers: list[StepObserver[Step]] = [*of_all_steps]
        self._recorder: Recorder | None = None  # None before the first step
        self._connections: Connections | None = None
        # First chunks of the models that were checked.
        self._checked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._calls = 0
        self._world = dist.group.WORLD
        self._pipeline: dist.ProcessGroup | None = None  # None before the first step
        self._has_ended = False
        _trainings.add(self)

    @property
    def is_over(self) -> bool:
        """Whether the process groups of this training are gone."""
        return self._has_ended or self._world is not dist.group.WORLD

    def end(self) -> None:
        """Release everything of this training before its process groups are destroyed, or after."""
        self._has_ended = True
        recorder, self._recorder, self._connections = self._recorder, None, None
        if recorder is not None:
            stop_listening(recorder)
            Watchdog.forget(recorder)
        hooks, self._hooks = self._hooks, {}
        for feature in hooks.values():
            feature.end()

    def finish(self, iteration: int) -> None:
        """Finish the training after its last iteration, ``iteration``."""
        for observer in self._observers:
            observer.finish(iteration)

    def interrupt(self) -> None:
        """Note that other work, such as a checkpoint save, takes place between two steps."""
        for feature in self._hooks.values():
            feature.interrupt()

    def run(self, call: Call) -> list[Any]:
        """Run one step, and return the losses as Megatron's schedule functions do.

        Raises:
            ValueError: the model's pipeline has other ranks than that of the first step.
        """
        self._pipeline = self._pipeline or call.pipeline
        refuse_other_pipeline(self._config, call.pipeline, self._pipeline)
        hooks = self._hooks_for(call)
        for feature in hooks:
            feature.check_call(call)
        recorder = self._recorder or self._begin(call, hooks)
        try:
            return self._run(call, recorder, hooks)
        finally:
            recorder.leave()

    def _run(self, call: Call, recorder: Recorder, hooks: Sequence[TrainingHooks]) -> list[Any]:
        if self._connections is None:
            refuse_after_failure(recorder)
        if call.forward_only:
            for feature in hooks:
                feature.before_evaluation()
            self.interrupt()
        shape = self._programs.shape(call.config, call.micro_batch_size, call.seq_length)
        self._programs.agree_on_costs(
            call.pipeline,
            call.config,
            call.models,
            shape,
            sequence=call.seq_length,
            micro_batch=call.micro_batch_size,
            microbatches=call.num_microbatches,
            forward_only=call.forward_only,
        )
        make = partial(self._program, call, shape, hooks)
        for feature in hooks if not call.forward_only else ():
            feature.choose_schedule(call, shape, make, self._connections)
        with self._heard_if_it_fails("the making of a program", CannotRun):
            program = make()
        connections = self._connections
        assert connections is not None
        self._calls += 1
        recorder.begin(current_iteration() or self._calls)
        with heard_if_it_fails(recorder, "a step, outside its passes"):
            step = self._step(call, connections, program, shape, hooks)
            return _evaluate(step) if call.forward_only else self._train(step)

    def _hooks_for(self, call: Call) -> list[TrainingHooks]:
        """Return the hooks of the features that take part in a step with ``call``."""
        features = features_of(self._config, call.config)
        for feature in features:
            if feature not in self._hooks:
                self._hooks[feature] = feature(self._config, self._programs)
                self._observers += self._hooks[feature].observers()
        return [self._hooks[feature] for feature in features]

    def _train(self, step: Step) -> list[Any]:
        call = step.call
        with _timed(call.config):
            for observer in self._observers:
                observer.begin(step)
            stages = run_passes(step)
            tokens = token_count(call, stages)
            for feature in step.hooks:
                if tokens is not None:
                    tokens = feature.after_passes(tokens)
            finalize_gradients(call, tokens)
        for observer in self._observers:
            observer.end(step)
        step.recorder.end()
        return _losses(stages)

    def _step(
        self,
        call: Call,
        connections: Connections,
        program: Program,
        shape: BatchShape,
        features: Sequence[TrainingHooks],
    ) -> Step:
        waits = self._programs.resolved_spec.traits.splits_backward and not call.forward_only
        reads_hooks = waits or any(feature.needs_callers_hooks for feature in features)
        reads_hooks = reads_hooks and not call.forward_only
        split = split_of(call.models, program, waits=waits, reads_hooks=reads_hooks)
        begun = (feature.begin(call, program, connections) for feature in features)
        step_hooks = tuple(feature for feature in begun if feature is not None)
        for feature in step_hooks:
            split = feature.split(split)
        return Step(
            pipeline=call.pipeline,
            program=program,
            recorder=connections.recorder,
            call=call,
            connections=connections,
            shape=shape,
            boundary=call.boundary(),
            split=split,
            hooks=step_hooks,
        )

    def _program(self, call: Call, shape: BatchShape, hooks: Sequence[TrainingHooks]) -> Program:
        """Return the program of this step, the same on every rank of the job. It is cached."""
        first_trained_stage = 0
        if not (call.forward_only or any(feature.trains_first_stage for feature in hooks)):
            first_trained_stage = self._programs.first_trained_stage(call.pipeline, call.models)
        self._check_models(call, hooks)
        key = self._programs.key(
            call.config,
            shape,
            call.num_microbatches,
            forward_only=call.forward_only,
            first_trained_stage=first_trained_stage,
        )
        known = self._programs.known(key)
        if known is not None:
            if self._connections is not None and not call.forward_only:
                with self._heard_if_it_fails("the swap of a program", RuntimeError):
                    self._programs.check_swap(call.pipeline, key, known)
            return known
        for feature in hooks:
            feature.check_new_program(call)
        if self._connections is None:
            program = self._programs.make(call.pipeline, call.config, key)
            assert self._recorder is not None
            with heard_if_it_fails(self._recorder, "the connecting of the ranks"):
                self._connections = self._connect(call, program, self._recorder, hooks)
        else:  # a program may be refused on a few ranks only, which must tell the others
            with self._heard_if_it_fails("the making of a program", RuntimeError):
                program = self._programs.make(call.pipeline, call.config, key)
        if not call.forward_only:
            log_program(program)
            for line in (line for feature in hooks for line in feature.log_lines(call)):
                log_single_rank(logger, logging.INFO, line)
        try:
            for feature in hooks:
                feature.expect(program, self._connections)
        except CannotRun:
            self._programs.forget(program)
            raise
        return program

    def _check_models(self, call: Call, hooks: Sequence[TrainingHooks]) -> None:
        """Check the models of ``call`` when they come for the first time.

        A process may train more than one model, such as an actor and a critic. The first check of a
        model is collective over the pipeline.
        """
        if call.models[0] in self._checked:
            return
        with self._heard_if_it_fails("the check of a model"):
            for feature in hooks:
                feature.check_models(call)
            # Ranks were connected for the token shifts (of multi-token prediction) of the first
            # model together with all other connections, so only later models are connected here.
            if self._connections is not None:
                connect_token_shifts(call.models, call.groups.cp)
        self._checked.add(call.models[0])

    def _heard_if_it_fails(
        self, where: str, kind: type[BaseException] = BaseException
    ) -> AbstractContextManager[None]:
        """Context in which an error of this ``kind`` ends the other ranks too.

        Ranks must be connected for that.
        """
        if self._connections is None:
            return contextlib.nullcontext()
        return heard_if_it_fails(self._connections.recorder, where, kind)

    def _begin(self, call: Call, hooks: Sequence[TrainingHooks]) -> Recorder:
        """Watch this rank, and listen for failures of other ranks, before anything is connected.

        Then the ranks of the pipeline exchange their identities; collective over them.
        """
        limits_host = all(feature.limits_host for feature in hooks)
        recorder = Recorder.before_exchange(call.pipeline, limits_host=limits_host)
        self._recorder = recorder
        Watchdog(recorder).start()
        if not restarts_in_process():  # with in-process restarts, their wrapper reports failures
            report = listen(recorder)
            if report is not None:
                weakref.finalize(self, report.stop)
        exchange_identities(recorder, call.pipeline)
        return recorder

    def _connect(
        self, call: Call, program: Program, recorder: Recorder, hooks: Sequence[TrainingHooks]
    ) -> Connections:
        connections = connect(self._config, program, call.pipeline, recorder)
        connect_token_shifts(call.models, call.groups.cp, recorder)
        for feature in hooks:
            feature.connect(call, program, connections)
        return connections


_trainings: weakref.WeakSet[PipelineTraining] = weakref.WeakSet()


def end_trainings() -> None:
    """End all trainings of this process: its process groups are being destroyed."""
    for training in list(_trainings):
        training.end()


def _evaluate(step: Step) -> list[Any]:
    with _timed(step.call.config):
        stages = run_passes(step)
    return _losses(stages)


def _losses(stages: Sequence[ModelStage]) -> list[Any]:
    return [loss for stage in stages for loss in stage.losses]


@contextlib.contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Context in which Megatron's own timer of a step runs."""
    if config.timers is None:
        yield
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers("forward-backward").stop()
