"""Step of training or evaluation under our schedule, with the interface of Megatron's schedule
functions.

It uses Megatron's forward_step and backward_step, and ends as Megatron's functions do: embedding
gradients, finalize_model_grads, timers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from megatron_ext.adapter.step.call import (
    Call,
    groups_of,
    refuse_call,
    refuse_chunks,
    refuse_shapes,
)
from megatron_ext.adapter.step.pipeline_training import PipelineTraining
from megatron_ext.adapter.stock.compared_step import FirstStep
from megatron_ext.adapter.training_globals import packs_microbatches
from megatron_ext.config import PipelineConfig


class PipelineStep:
    """Schedule function with Megatron's interface, for one training after another in a process.

    Attributes:
        first_step: the first step, which is compared with Megatron's own if the user allows unknown
            sources.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self._config = config
        self._training: PipelineTraining | None = None
        self.first_step = FirstStep(config)

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
        """Run one step; arguments and result are those of Megatron's schedule functions."""
        arguments = dict(locals())
        del arguments["self"]
        models = model if isinstance(model, list) else [model]
        config = get_model_config(models[0])
        refuse_call(
            self._config,
            config,
            adjust_tensor_shapes_fn,
            p2p_communicator,
            pg_collection,
        )
        pipeline, groups = groups_of(p2p_communicator, pg_collection)
        # Packed microbatches are a single row, a shape that Megatron's arguments do not give.
        if packs_microbatches():
            seq_length, micro_batch_size = seq_length * micro_batch_size, 1
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
            has_own_communicator=p2p_communicator is not None,
        )
        refuse_chunks(self._config, call)
        refuse_shapes(self._config, call)
        return self.first_step.run(call, arguments, self._current_training().run)

    def finish(self, iteration: int) -> None:
        """Tell the observers of the current training that it ends after ``iteration``."""
        if self._training is not None:
            self._training.finish(iteration)

    def interrupt(self) -> None:
        """Note that other work, such as a checkpoint save, takes place between two steps."""
        if self._training is not None:
            self._training.interrupt()

    def _current_training(self) -> PipelineTraining:
        if self._training is not None and self._training.is_over:
            self._training.end()
            self._training = None
        self._training = self._training or PipelineTraining(self._config)
        return self._training
