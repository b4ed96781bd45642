"""One step of training or evaluation under our schedule, as Megatron's schedule functions run one.

It takes the same arguments, uses Megatron's forward_step and backward_step, and ends as stock ends:
embedding gradients, finalize_model_grads, timers.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
)
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_ext.adapter.compatibility import refuse
from megatron_ext.adapter.end_stage import EndStage, ends_of
from megatron_ext.adapter.gpu_notice import say_unverified
from megatron_ext.adapter.model_stage import ModelStage, StepCall
from megatron_ext.adapter.observers.profile import Shape, StepProfile
from megatron_ext.adapter.observers.split_report import split_report
from megatron_ext.adapter.observers.trace import StepTrace
from megatron_ext.adapter.observers.writers import current_iteration
from megatron_ext.adapter.post_validation.optimizer import SpeculativeOptimizer
from megatron_ext.adapter.post_validation.pending import post_validation
from megatron_ext.adapter.post_validation.step import (
    SpeculativeStep,
)
from megatron_ext.adapter.programs import Programs, gather
from megatron_ext.adapter.tied import copies_differ
from megatron_ext.adapter.vocabulary_rows import part_of, tables
from megatron_ext.config import PipelineConfig
from megatron_ext.runtime.executor import Messages, execute
from megatron_ext.runtime.host.memory import check_host_memory
from megatron_ext.runtime.host.offload import ActivationOffload
from megatron_ext.runtime.interruption import Interruption
from megatron_ext.runtime.last_words import connect_last_words
from megatron_ext.runtime.messages.batched import BatchedTransport, PipelineGroup
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.collectives import Collectives
from megatron_ext.runtime.messages.nccl import ctas_for
from megatron_ext.runtime.messages.transport import Boundary, Transport
from megatron_ext.runtime.post_validation.messages import ValidationMessages
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.vocabulary.passes import VocabularyPasses
from megatron_ext.runtime.vocabulary.shard import VocabularyShard
from megatron_ext.runtime.watchdog import Watchdog
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.runtime.whereabouts import whereabouts
from megatron_ext.schedule.build.head import head_waits
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import P2P, Offload, VocabularyParallel
from megatron_ext.schedule.program.graph import channels
from megatron_ext.schedule.program.verify import Program
from megatron_ext.schedule.show.summary import summary


class PipelineStep:
    """Runs steps under one configured schedule. Lives as long as the training does."""

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._choice = config.choice()
        self._p2p = config.messages()
        self._vocabulary = config.vocabulary()
        self._leaves = config.offload()
        self._programs = Programs(config)
        self._connection: Channels | PipelineGroup | None = None
        self._collectives: Collectives | None = None
        self._recorder: Recorder | None = None
        self._offload: ActivationOffload | None = None
        self._validation: ValidationMessages | None = None
        self._has_reported = False
        self._calls = 0
        self._trace = None
        if config.trace is not None:
            self._trace = StepTrace(
                Path(config.trace), config.traced_iterations(), overlap=config.post_validation
            )
        path = config.profile()
        self._profile = None if path is None else StepProfile(path)

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
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(models[0])
        validates = self._config.post_validation
        refuse(config, self._choice, self._vocabulary, self._leaves, validates)
        if config.variable_seq_lengths and self._p2p is P2P.BATCHED:
            raise ValueError(
                "--pipeline-p2p batched does not go with variable_seq_lengths: a tensor can be "
                "received only when its shape has come, after its batch; drop the flag"
            )
        if adjust_tensor_shapes_fn is not None:
            raise ValueError(
                f"adjust_tensor_shapes_fn is not supported by --pipeline-schedule "
                f"{self._config.schedule}: it sends one tensor between stages; drop the flag"
            )
        if self._vocabulary is not VocabularyParallel.NONE and collect_non_loss_data:
            raise ValueError(
                f"collect_non_loss_data does not go with --pipeline-vocab-parallel "
                f"{self._vocabulary}: no rank has whole logits; drop the flag"
            )
        if isinstance(pg_collection, MultiModuleProcessGroupCollection):
            raise ValueError(
                f"--pipeline-schedule {self._config.schedule} runs one model, and this "
                f"pg_collection holds several ({type(pg_collection).__name__}); drop the flag"
            )
        if (p2p_communicator is None) != (pg_collection is None):
            raise ValueError("Provide both p2p_communicator and pg_collection, or neither")
        if p2p_communicator is None:
            pg_collection = _default_groups()
            pipeline = parallel_state.get_pipeline_model_parallel_group()
        else:
            pipeline = p2p_communicator.pp_group
            if validates:
                raise ValueError(
                    "--pipeline-post-validation is for Megatron's own training loop, and this "
                    "caller has a p2p_communicator of its own; drop the flag"
                )
        if validates and forward_only:
            post_validation.settle()

        shape = None
        if self._profile is not None and not config.variable_seq_lengths:
            shape = micro_batch_size, seq_length
        self._programs.agree_on_costs(pipeline, config, models, shape, seq_length, micro_batch_size)
        program = self._program(pipeline, config, models, shape, num_microbatches, forward_only)
        shapes = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=pg_collection.tp,
            cp_group=pg_collection.cp,
        )
        boundary = Boundary(
            None if config.variable_seq_lengths else tuple(shapes[0]), config.pipeline_dtype
        )
        placement = program.schedule.placement
        assert self._recorder is not None
        self._calls += 1
        self._recorder.begin(current_iteration() or self._calls)
        call = StepCall(
            forward_step_func,
            num_microbatches,
            forward_only,
            collect_non_loss_data,
            first_val_step,
            bool(force_all_reduce),
            pg_collection.cp.size(),
        )
        validation = None
        if self._validation is not None and not forward_only:
            validation = SpeculativeStep(post_validation, self._validation, iterators)
            iterators = validation.iterators
        stages = {
            number: self._stage(number, chunk, config, iterator, call, placement)
            for number, chunk, iterator in zip(
                placement.stages_of[pipeline.rank()], models, iterators, strict=True
            )
        }

        with self._heard_if_it_fails():
            if config.timers is not None:
                config.timers("forward-backward", log_level=1).start(
                    barrier=config.barrier_with_L1_time
                )
            transport = self._transport(program, boundary)
            trace = None if forward_only else self._trace
            if trace is not None:
                trace.begin(pipeline, self._recorder)
            profile = None if forward_only else self._profile
            full = Boundary(tuple(shapes[0]), config.pipeline_dtype)
            if profile is not None:
                profile.begin(pipeline, self._recorder, models, shape, placement.stages, full)
            reports = self._config.report_split and not forward_only and not self._has_reported
            queue.weights = set() if reports else None
            splits = self._choice.splits_backward and not forward_only
            at_once = frozenset[torch.Tensor]() if head_waits(program) else _head_weights(models)
            vocabulary = None
            if self._vocabulary is not VocabularyParallel.NONE:
                assert self._collectives is not None
                shard = _shard(models, pipeline, pg_collection.tp)
                vocabulary = VocabularyPasses(
                    program,
                    ends_of(stages.values()),
                    shard,
                    self._collectives,
                    boundary,
                    (micro_batch_size, seq_length),
                    self._recorder,
                )
                at_once = frozenset()  # its gradient has a pass of its own
                if queue.weights is not None:
                    queue.weights.add(shard.output)
            offload = None
            if self._offload is not None and not forward_only:
                offload = self._offload.step(program.schedule.rows[pipeline.rank()])
            with _no_grad_sync(config), _splitting(splits, at_once):
                execute(program, stages, transport, self._recorder, vocabulary, offload, validation)
            if queue.weights is not None:
                self._report_split(pipeline, models, queue.weights, at_once)
            if config.finalize_model_grads_func is not None and not forward_only:
                tokens = None
                if config.calculate_per_token_loss:
                    counted = [stage.tokens for stage in stages.values()]
                    tokens = torch.stack(counted).sum(dtype=torch.int)
                    if validation is not None and post_validation.is_armed:
                        scale = functools.partial(_scale_gradients, models, pg_collection)
                        post_validation.scale_by_tokens(int(tokens), scale)
                        tokens = None
                config.finalize_model_grads_func(
                    models,
                    tokens,
                    pg_collection=pg_collection,
                    force_all_reduce=force_all_reduce,
                )
            if config.timers is not None:
                config.timers("forward-backward").stop()
            if trace is not None:
                trace.end(pipeline, program)
            if profile is not None:
                self._measure(profile, pipeline, config, program, shape, full)
            self._recorder.recording = None
        return [loss for stage in stages.values() for loss in stage.losses]

    def _report_split(
        self,
        pipeline: dist.ProcessGroup,
        models: list[torch.nn.Module],
        put_off: set[torch.Tensor],
        at_once: frozenset[torch.Tensor],
    ) -> None:
        lines = gather(pipeline, split_report(models, put_off, at_once))
        if dist.get_rank() == 0:
            for rank, line in enumerate(lines):
                print(f"megatron_ext: pipeline rank {rank}: {line}", flush=True)
        self._has_reported = True

    def finish(self, iteration: int) -> None:
        """The training has ended with ``iteration``."""
        if self._profile is not None:
            self._profile.finish(iteration)

    def _measure(
        self,
        profile: StepProfile,
        pipeline: dist.ProcessGroup,
        config: Any,
        program: Program,
        shape: Shape,
        boundary: Boundary,
    ) -> None:
        """After a training step of ``program``: if costs are measured now, use them from now on."""
        assert self._recorder is not None and self._connection is not None
        estimate = self._programs.costs[shape]
        costs = profile.end(self._recorder, program, self._connection, shape, boundary, estimate)
        if costs is None:
            return
        try:
            now = self._programs.make_again(pipeline, config, shape, costs, program)
        except ValueError as error:
            error.add_note(profile.note())
            raise
        if dist.get_rank() == 0:
            print(f"megatron_ext: {profile.change(program, now, costs)}", flush=True)

    def _program(
        self,
        pipeline: dist.ProcessGroup,
        config: Any,
        models: list[torch.nn.Module],
        shape: Shape,
        num_microbatches: int,
        forward_only: bool,
    ) -> Program:
        """The program for this step, the same on every rank of the job; cached."""
        known = self._programs.known(config, shape, num_microbatches, forward_only)
        if known is not None:
            return known
        if self._connection is None and any(gather(pipeline, copies_differ(models))):
            raise ValueError(
                "the last pipeline rank holds both copies of a tied embedding, and they differ: a "
                "model built or loaded without Megatron's own functions starts with a copy of its "
                "own; copy model[0].shared_embedding_or_output_weight() to model[-1]'s on that rank"
            )
        try:
            program = self._programs.make(pipeline, config, shape, num_microbatches, forward_only)
        except RuntimeError as error:  # that ranks differ: some may not see it
            self._tell(error, "the making of a program")
            raise
        if self._connection is None:
            device = torch.device(torch.cuda.current_device())
            if dist.get_rank() == 0:
                say_unverified(device, program.problem)
            ctas = ctas_for(program, pipeline, device)
            if self._p2p is P2P.BATCHED:
                self._connection = PipelineGroup(pipeline, device)
            else:
                self._connection = Channels(pipeline, channels(program.schedule), device, ctas)
            if self._vocabulary is not VocabularyParallel.NONE:
                self._collectives = Collectives(pipeline, device, ctas)
            if self._leaves is not Offload.NONE:
                self._offload = ActivationOffload(pipeline.rank(), device)
            self._recorder = Recorder(pipeline.rank(), whereabouts(pipeline))
            if self._config.post_validation:
                placement = program.schedule.placement
                messages = ValidationMessages(pipeline, placement, self._recorder)
                post_validation.connect(
                    messages, functools.partial(SpeculativeOptimizer, models=models)
                )
                self._validation = messages
            Watchdog(self._recorder).start()
            self._listen(self._recorder)
        if config.variable_seq_lengths:
            assert isinstance(self._connection, Channels)
            self._connection.connect_hosts()
        if not forward_only and dist.get_rank() == 0:
            print(f"megatron_ext: {summary(program)}", flush=True)
        if self._offload is not None and not forward_only:
            row = program.schedule.rows[pipeline.rank()]
            host_memory = check_host_memory(row, program.problem.costs)
            self._offload.expect(row, program.problem.costs)
            if dist.get_rank() == 0:
                print(f"megatron_ext: {host_memory}", flush=True)
        return program

    @contextlib.contextmanager
    def _heard_if_it_fails(self) -> Iterator[None]:
        """Around a step: an error beside its passes ends the other ranks too. (One in a pass has
        been told, by the executor.)"""
        try:
            yield
        except BaseException as error:
            self._tell(error, "a step, beside its passes")
            raise

    def _tell(self, error: BaseException, where: str) -> None:
        """Tell the other ranks of ``error``, if they are connected and have not been told."""
        if self._recorder is None or self._recorder.has_failed:
            return
        self._recorder.failed(error, where)
        for connection in (self._connection, self._collectives):
            if connection is not None:
                connection.close()

    def _listen(self, recorder: Recorder) -> None:
        """Hear of ranks that fail, from now on. Collective over the world."""
        recorder.last_words = connect_last_words()
        if recorder.last_words is not None:
            assert self._connection is not None
            connections = [c for c in (self._connection, self._collectives) if c is not None]
            recorder.last_words.start(Interruption(recorder, connections))
            weakref.finalize(self, recorder.last_words.stop)

    def _transport(self, program: Program, boundary: Boundary) -> Messages:
        """The messages of one step."""
        assert self._connection is not None and self._recorder is not None
        if isinstance(self._connection, PipelineGroup):
            return BatchedTransport(self._connection, boundary, program, self._recorder)
        placement = program.schedule.placement
        return Transport(self._connection, boundary, placement, self._recorder)

    def _stage(
        self,
        number: int,
        chunk: torch.nn.Module,
        config: Any,
        data_iterator: Any,
        call: StepCall,
        placement: Placement,
    ) -> ModelStage:
        assert self._recorder is not None
        is_last = number == placement.stages - 1
        common = number, chunk, config, data_iterator, call, self._recorder
        if self._vocabulary is not VocabularyParallel.NONE and (number == 0 or is_last):
            return EndStage(*common, is_last=is_last)
        return ModelStage(*common, has_loss=is_last)


def _shard(
    models: list[torch.nn.Module],
    pipeline: dist.ProcessGroup,
    tensor_parallel: dist.ProcessGroup,
) -> VocabularyShard:
    """This rank's part of the vocabulary."""
    embedding, output = tables(models)
    return VocabularyShard(
        embedding,
        output,
        first_row=part_of(pipeline, tensor_parallel).index * len(output),
        tensor_parallel=tensor_parallel if tensor_parallel.size() > 1 else None,
        sequence_parallel=get_model_config(models[0]).sequence_parallel,
    )


def _default_groups() -> Any:
    """The groups that stock's schedules take where their caller gives none."""
    # Megatron 0.18 has no function for them.
    everything = ProcessGroupCollection.use_mpu_process_groups
    return getattr(schedules, "_build_default_pg_collection", everything)()


def _scale_gradients(models: list[torch.nn.Module], groups: Any, tokens: int) -> None:
    """Divide the gradients by the ``tokens`` of all data-parallel replicas of this pipeline, as
    finalize_model_grads does once it has them from the last rank."""
    replicas = getattr(groups, "dp_cp_gtp_remat", None) or groups.dp_cp
    total = torch.tensor(tokens, dtype=torch.int, device=torch.cuda.current_device())
    dist.all_reduce(total, group=replicas)
    for model in models:
        model.scale_gradients(1.0 / torch.clamp(total, min=1))  # type: ignore[operator]


@contextlib.contextmanager
def _no_grad_sync(config: Any) -> Iterator[None]:
    """Hold back the reductions that backward hooks would start before W has run."""
    functions = config.no_sync_func or []
    with contextlib.ExitStack() as stack:
        for no_sync in functions if isinstance(functions, list) else [functions]:
            stack.enter_context(no_sync())
        yield


def _head_weights(models: list[torch.nn.Module]) -> frozenset[torch.Tensor]:
    """The output layer's weight, on the rank that has it. (A pipeline's last stage has its own,
    tied or not.)"""
    model = get_attr_wrapped_model(models[-1], "decoder", return_model_obj=True)
    weight = getattr(getattr(model, "output_layer", None), "weight", None)
    return frozenset() if weight is None else frozenset([weight])


@contextlib.contextmanager
def _splitting(splits: bool, at_once: frozenset[torch.Tensor]) -> Iterator[None]:
    """Tell split layers that W passes will come, but not for ``at_once``; leave nothing behind,
    whatever happens."""
    queue.splitting = splits
    queue.at_once = at_once
    try:
        yield
        assert not len(queue), "weight gradients are left over after the step"
    finally:
        queue.clear()
