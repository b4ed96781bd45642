"""Bytes that each rank takes whatever its schedule: parameters, gradients and optimizer states,
exactly as Megatron stores them, the largest temporary tensors of a pass, CUDA's context and NCCL's
buffers.

The distributed optimizer lays parameters out in buckets, aligned and padded to a multiple of the
number of data-parallel ranks; the padding counts. The bytes are those of the first data-parallel
rank, which has the fullest parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache

from megatron_ext.cost_model.context import context_bytes
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.operations.temporaries import temporary_bytes
from megatron_ext.cost_model.parameters import (
    Parameter,
    parameters_of_stage,
    table_elements,
)
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import VocabularyParallel

_FP32 = 4
_ALIGNED = 64  # a parameter begins at a multiple of this number of elements
# The elements of a bucket are a multiple of this number and of the number of data-parallel ranks.
_BUCKET_END = 128
_LARGE_BUCKET_END = 2**16


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model on one rank, without stored activations.

    Attributes:
        expert_weights, expert_gradients: the part of ``weights`` and ``gradients`` that only
            data-parallel ranks with the same experts have.
        temporary: bytes of temporary tensors in the largest pass.
        context: bytes that no tensor takes (`context_bytes`).
        gathered, expert_gathered: bytes of the trained weights in the form in which data-parallel
            ranks gather them after the optimizer, and the part of experts.
    """

    weights: float
    gradients: float
    optimizer: float
    expert_weights: float = 0.0
    expert_gradients: float = 0.0
    temporary: float = 0.0
    context: float = 0.0
    gathered: float = 0.0
    expert_gathered: float = 0.0

    @property
    def stored(self) -> float:
        """Bytes of the rank's parameters, gradients and optimizer states."""
        return self.weights + self.gradients + self.optimizer

    @property
    def lasting(self) -> float:
        """Bytes that a rank allocates once, for all steps of a training."""
        return self.stored + self.context

    @property
    def total(self) -> float:
        """Bytes of everything on a rank except the activations that schedules store."""
        return self.lasting + self.temporary


@dataclass(frozen=True)
class TrainingState:
    """How gradients and optimizer states of each parameter are stored and sharded.

    Attributes:
        distributed: whether data-parallel ranks share the optimizer states.
        data_parallel: number of ranks that share the states of all parameters but experts',
            including context-parallel ranks.
        expert_data_parallel: number of ranks that share the states of experts.
        weight_bytes: bytes of a parameter in the model.
        matrix_bytes: bytes of an element of layers' matrices if they differ, as in 8 bits.
        gathered_matrix_bytes: bytes of an element of layers' matrices as data-parallel ranks gather
            them; None: as of any other parameter.
        gradient_bytes: bytes of one gradient.
        optimizer_bytes: bytes of a parameter's states: a master copy and two moments in fp32.
        bucket: number of elements after which a bucket of gradients ends, on the first stage, if
            reductions overlap; 0: there is one bucket.
        large_buckets: whether buckets are padded for the network's sake.
    """

    distributed: bool = False
    data_parallel: int = 1
    expert_data_parallel: int = 1
    weight_bytes: float = 2
    matrix_bytes: float | None = None
    gathered_matrix_bytes: float | None = None
    gradient_bytes: int = _FP32
    optimizer_bytes: float = 3 * _FP32
    bucket: int = 0
    large_buckets: bool = False

    @property
    def gathered_bytes(self) -> float:
        """Bytes of an element of a bucket of layers' matrices, as the ranks gather it."""
        alone = self.gathered_matrix_bytes
        return self.weight_bytes if alone is None else alone


# Megatron's sizes of a gradient bucket in elements: the least size, and the size per data-parallel
# rank.
_BUCKET, _BUCKET_OF_RANK = 40_000_000, 1_000_000


def default_bucket(data_parallel: int) -> int:
    """Return Megatron's default number of elements after which a bucket of gradients ends."""
    return max(_BUCKET, _BUCKET_OF_RANK * data_parallel)


def bytes_of_ranks(
    model: Model,
    stages: Sequence[Stage],
    execution: Execution,
    placement: Placement,
    vocabulary: VocabularyParallel,
    state: TrainingState,
) -> list[ModelBytes]:
    """Return the model's bytes on each rank, for ``stages`` that ``placement`` puts on the
    ranks."""
    tables_of = tables_of_chunks(placement, vocabulary)
    is_divided = vocabulary is not VocabularyParallel.NONE
    loss_share = 1 / placement.ranks if is_divided else None
    context = context_bytes(
        execution,
        pipeline=placement.ranks,
        data_parallel=state.data_parallel,
        expert_data_parallel=state.expert_data_parallel,
    )
    rank_bytes = []
    for stages_of_rank in placement.stages_of:
        chunks = [
            bytes_of_chunk(
                model,
                stages[stage],
                execution,
                state,
                tables=tables,
                bucket=state.bucket if stage == 0 else 0,
            )
            for stage, tables in zip(stages_of_rank, tables_of, strict=True)
        ]
        temporary = max(
            temporary_bytes(model, stages[stage], execution, loss_share=loss_share)
            for stage in stages_of_rank
        )
        rank_bytes.append(replace(_summed(chunks), temporary=temporary, context=context))
    return rank_bytes


def least_lasting(ranks: Sequence[ModelBytes] | None) -> float:
    """Return the bytes that are allocated once, on the rank where they are fewest.

    0 if they are not known.
    """
    return min((rank.lasting for rank in ranks or ()), default=0.0)


def _summed(parts: Sequence[ModelBytes]) -> ModelBytes:
    return ModelBytes(*map(sum, zip(*map(astuple, parts), strict=True)))


def tables_of_chunks(placement: Placement, vocabulary: VocabularyParallel) -> list[int]:
    """Return over how many ranks embedding and output layer are partitioned, for each chunk of a
    rank.

    1: these tables are whole, on their stages; 0: another chunk has this rank's parts.
    """
    if vocabulary is VocabularyParallel.NONE:
        return [1] * placement.chunks
    return [placement.ranks] + [0] * (placement.chunks - 1)


@cache
def bytes_of_chunk(
    model: Model,
    stage: Stage,
    execution: Execution,
    state: TrainingState,
    *,
    tables: int,
    bucket: int,
) -> ModelBytes:
    """Return the model's bytes of ``stage`` on one rank, without temporary tensors and context.

    ``tables`` is an entry of `tables_of_chunks`, ``bucket`` the elements after which a bucket of
    gradients ends; 0: there is one bucket.
    """
    parameters = parameters_of_chunk(model, stage, execution, tables=tables)
    frozen = sum(p.elements for p in parameters if p.is_frozen) * state.weight_bytes
    parameters = [p for p in parameters if not p.is_frozen]
    parts = [ModelBytes(frozen, 0.0, 0.0)]
    for of_experts, ranks in ((False, state.data_parallel), (True, state.expert_data_parallel)):
        group = [p for p in parameters if p.of_experts is of_experts]
        in_buffer, shared = _elements(group, state, ranks, bucket)
        matrices = sum(p.elements for p in group if p.is_matrix)
        more = 0.0 if state.matrix_bytes is None else state.matrix_bytes - state.weight_bytes
        weights = in_buffer * state.weight_bytes + matrices * more
        gradients = in_buffer * state.gradient_bytes
        less = matrices * (state.weight_bytes - state.gathered_bytes)
        gathered = in_buffer * state.weight_bytes - less
        parts.append(
            ModelBytes(
                weights,
                gradients,
                shared * state.optimizer_bytes,
                expert_weights=weights * of_experts,
                expert_gradients=gradients * of_experts,
                gathered=gathered,
                expert_gathered=gathered * of_experts,
            )
        )
    return _summed(parts)


def parameters_of_chunk(
    model: Model, stage: Stage, execution: Execution, *, tables: int
) -> list[Parameter]:
    """Return the parameters of ``stage`` on one rank, also with a partitioned vocabulary.

    ``tables`` is an entry of `tables_of_chunks`.
    """
    parameters = list(parameters_of_stage(model, stage, execution))
    if tables != 1:
        parameters = [p for p in parameters if not p.is_table]
    if tables > 1:
        part = table_elements(model) // execution.tensor_parallel // tables
        number = 2 if model.untie_embeddings_and_output_weights else 1
        parameters += number * [Parameter(part, is_table=True, is_frozen=model.is_frozen)]
    return parameters


def _elements(
    parameters: Sequence[Parameter], state: TrainingState, ranks: int, bucket: int
) -> tuple[int, int]:
    """Return the number of elements of a gradient buffer, padding included, and of those whose
    optimizer states a rank holds.

    The buffer is that of ``parameters``. Its optimizer states are partitioned over ``ranks``, of
    which the first is counted.
    """
    if not state.distributed:
        elements = sum(parameter.elements for parameter in parameters)
        return elements, elements
    divisor = math.lcm(ranks, _BUCKET_END, _LARGE_BUCKET_END if state.large_buckets else 1)
    in_buffer = shared = 0
    for in_bucket in _buckets(parameters, bucket):
        ends = _ends(in_bucket)
        size = _up_to(ends[-1], divisor)
        in_buffer += size
        shared += _before(size // ranks, in_bucket, ends)
    return in_buffer, shared


def _buckets(parameters: Sequence[Parameter], bucket: int) -> Iterable[Sequence[Parameter]]:
    """Yield the parameters of each bucket of gradients.

    The last parameter comes first, as its gradient does.
    """
    in_bucket: list[Parameter] = []
    end = 0
    for parameter in reversed(parameters):
        if parameter.is_alone and in_bucket:
            yield in_bucket
            in_bucket, end = [], 0
        in_bucket.append(parameter)
        end = _up_to(end, _ALIGNED) + parameter.elements
        if parameter.is_alone or (bucket and end >= bucket):
            yield in_bucket
            in_bucket, end = [], 0
    if in_bucket:
        yield in_bucket


def _ends(parameters: Sequence[Parameter]) -> list[int]:
    """Return the end of each parameter of a bucket of gradients, in elements from its start."""
    ends: list[int] = []
    for parameter in parameters:
        start = _up_to(ends[-1], _ALIGNED) if ends else 0
        ends.append(start + parameter.elements)
    return ends


def _before(end: int, parameters: Sequence[Parameter], ends: Sequence[int]) -> int:
    """Return the number of elements of ``parameters`` before position ``end`` of their bucket."""
    return sum(
        max(0, min(own_end, end) - (own_end - parameter.elements))
        for parameter, own_end in zip(parameters, ends, strict=True)
    )


def _up_to(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
