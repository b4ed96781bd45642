"""A described training job whose parallel sizes are open.

What stays the same when sizes change is the model, the GPUs, the global batch, the sequence and the
precision. Everything else, from the padded vocabulary to the memory that is left, follows from the
sizes, and is computed for each here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.gpus import free_memory
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.model_memory import (
    ModelBytes,
    TrainingState,
    default_bucket,
    least_lasting,
)
from megatron_ext.cost_model.rates import Rates
from megatron_ext.planner.layouts.recompute import LayerRecompute
from megatron_ext.planner.sizes.sizes import Sizes


@dataclass(frozen=True)
class SizedJob:
    """Training job whose parallel sizes may change: tensor, pipeline, context, expert, micro-batch.

    Model, GPUs, global batch, sequence and precision are the same for all sizes.

    Attributes:
        model: the model, with the vocabulary padded for the job's own sizes.
        execution, state: how the model is trained with the job's own sizes.
        sizes: the job's own sizes.
        global_batch: samples of a step.
        recompute: the recompute of layers that Megatron could do, the job's own first.
        memory: bytes of a GPU; None: unknown.
        reserved: bytes that a rank's allocator was measured to reserve; None: not measured.
        tokens: vocabulary before it is padded; None: it stays as ``model`` has it.
        multiple: tokens per tensor-parallel rank of which a padded vocabulary is a multiple.
        instances: instances of the distributed optimizer.
        has_default_buckets: whether buckets of gradients have the size that Megatron gives them.
        pipeline_inside: whether ranks of a pipeline are neighbours of a tensor- and
            context-parallel group (``--use-tp-pp-dp-mapping``).
    """

    model: Model
    execution: Execution
    state: TrainingState
    rates: Rates
    sizes: Sizes
    gpus: int
    global_batch: int
    recompute: tuple[LayerRecompute, ...]
    memory: float | None = None
    reserved: float | None = None
    tokens: int | None = None
    multiple: int = 128
    instances: int = 1
    has_default_buckets: bool = True
    pipeline_inside: bool = False

    def microbatches(self, sizes: Sizes) -> int:
        """Return the microbatches of a step with these parallel ``sizes``.

        0 if the global batch is not divisible.
        """
        samples = sizes.micro_batch * sizes.data_parallel(self.gpus)
        return 0 if not samples or self.global_batch % samples else self.global_batch // samples

    def model_of(self, sizes: Sizes) -> Model:
        """Return the model with its vocabulary padded for these parallel ``sizes``."""
        if self.tokens is None:
            return self.model
        multiple = self.multiple * sizes.tensor
        return replace(self.model, vocabulary=-(-self.tokens // multiple) * multiple)

    def execution_of(self, sizes: Sizes, recompute: LayerRecompute) -> Execution:
        """Return how a rank executes a microbatch with these parallel ``sizes`` and recompute."""
        return recompute.in_execution(
            replace(
                self.execution,
                tensor_parallel=sizes.tensor,
                context_parallel=sizes.context,
                expert_parallel=sizes.expert,
                expert_tensor_parallel=sizes.expert_tensor,
                micro_batch=sizes.micro_batch,
                sequence_parallel=sizes.sequence_parallel,
                userbuffers=self.execution.userbuffers if sizes.tensor > 1 else frozenset(),
            )
        )

    def state_of(self, sizes: Sizes) -> TrainingState:
        """Return the types and the sharding of parameters and optimizer states with these
        ``sizes``."""
        copies = sizes.data_parallel(self.gpus) * sizes.context // self.instances
        of_experts = sizes.expert_tensor * sizes.expert * sizes.pipeline
        bucket = self.state.bucket
        if bucket and self.has_default_buckets:
            bucket = default_bucket(copies)
        return replace(
            self.state,
            data_parallel=copies,
            expert_data_parallel=max(self.gpus // of_experts // self.instances, 1),
            bucket=bucket,
        )

    def stride(self, sizes: Sizes) -> int:
        """Return the distance in global ranks from one pipeline rank to the next with these
        ``sizes``."""
        if self.pipeline_inside:
            return sizes.tensor * sizes.context
        return self.gpus // sizes.pipeline

    def memory_of(self, model: Sequence[ModelBytes]) -> float | None:
        """Return the bytes that a rank may take; None if unknown.

        ``model`` has the model's bytes on each rank.
        """
        if self.memory is None:
            return None
        lasting = least_lasting(model)
        return free_memory(self.memory, self.reserved, lasting=lasting).allocated
