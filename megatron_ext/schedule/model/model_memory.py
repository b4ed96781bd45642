"""What parameters, gradients and optimizer states take on each rank, counted from dimensions.

As Megatron trains with Adam: 16-bit weights have gradients and master weights in fp32, and the
distributed optimizer shares master weights and moments among the data-parallel ranks. Counted are
the matrices, the norms' scales and the two tables; biases and learned positions are not.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.schedule.model.estimate import ModelDimensions, transformer_layer
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import VocabularyParallel

_FP32 = 4


@dataclass(frozen=True)
class ModelBytes:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class TrainingState:
    """What is kept for each parameter.

    Attributes:
        tied: whether embedding and output layer are one table. Where they are on two stages each
            has a copy.
        optimizer_ranks: data-parallel ranks that share the optimizer states; 1: each has all.
        gradient_bytes: of one gradient.
    """

    tied: bool = False
    optimizer_ranks: int = 1
    gradient_bytes: int = _FP32


def bytes_of_ranks(
    model: ModelDimensions,
    placement: Placement,
    vocabulary: VocabularyParallel,
    state: TrainingState,
) -> list[ModelBytes]:
    """Bytes of each rank of ``placement``, whose stages have ``model.layers``."""
    of_stages = parameters_of_stages(model, placement, vocabulary, tied=state.tied)
    moments = 2 * _FP32
    master = _FP32 if model.element_bytes < _FP32 else 0
    rank_bytes = []
    for stages in placement.stages_of:
        parameters = sum(of_stages[stage] for stage in stages)
        rank_bytes.append(
            ModelBytes(
                weights=parameters * model.element_bytes,
                gradients=parameters * state.gradient_bytes,
                optimizer=parameters * (master + moments) / state.optimizer_ranks,
            )
        )
    return rank_bytes


def parameters_of_stages(
    model: ModelDimensions, placement: Placement, vocabulary: VocabularyParallel, *, tied: bool
) -> list[float]:
    """Parameters of each stage on one tensor-parallel rank. A rank's part of the tables is counted
    to its first stage, where they are divided."""
    norms = 2 * model.hidden
    layer = transformer_layer(model).weights / model.tensor_parallel + norms
    parameters = [count * layer for count in model.layers]
    parameters[-1] += model.hidden  # the final norm
    table = model.vocabulary * model.hidden / model.tensor_parallel
    if vocabulary is VocabularyParallel.NONE:
        for end in (0, -1):
            parameters[end] += table
    else:
        for stages in placement.stages_of:
            parameters[stages[0]] += (1 if tied else 2) * table / placement.ranks
    return parameters
