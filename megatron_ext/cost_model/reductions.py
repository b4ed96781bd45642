"""Seconds that data-parallel ranks take once a step to reduce gradients and to gather parameters.
They count in full, as if no pass overlapped them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from megatron_ext.cost_model.execution import Execution, Framework
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.model_memory import (
    TrainingState,
    parameters_of_chunk,
    tables_of_chunks,
)
from megatron_ext.cost_model.parameters import has_final_norm
from megatron_ext.cost_model.rates import Rates
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import VocabularyParallel

# Nodes of a ring that is as fast as its links; of more nodes it is slower in proportion. An
# assumption, which rests on one measured set of 32 nodes (scripts/layouts/a100.csv, 30B).
FULL_SPEED_NODES = 8


@dataclass(frozen=True)
class Reduction:
    """Seconds of one rank.

    Attributes:
        gradients: seconds to reduce gradients; with the distributed optimizer each rank receives
            only its share.
        parameters: seconds to gather the parameters that other ranks' optimizers have updated.
    """

    gradients: float
    parameters: float

    @property
    def total(self) -> float:
        return self.gradients + self.parameters


def reductions_of_ranks(
    model: Model,
    stages: Sequence[Stage],
    execution: Execution,
    placement: Placement,
    vocabulary: VocabularyParallel,
    state: TrainingState,
    rates: Rates,
) -> list[Reduction]:
    """Return the seconds of each rank of ``placement``, on which ``stages`` are placed."""
    final_norms = has_final_norm(model, stages)
    of_experts = execution.expert_tensor_parallel * execution.expert_parallel
    a_byte = (
        seconds_of_a_byte(
            state.data_parallel, execution.tensor_parallel, rates, execution.framework
        ),
        seconds_of_a_byte(state.expert_data_parallel, of_experts, rates, execution.framework),
    )
    reductions = []
    for own in placement.stages_of:
        seconds = 0.0  # for a byte of each element
        for stage, tables in zip(own, tables_of_chunks(placement, vocabulary), strict=True):
            elements = _elements(model, stages[stage], execution, final_norms[stage], tables)
            seconds += sum(map(operator.mul, elements, a_byte))
        if state.distributed:
            reductions.append(
                Reduction(seconds * state.gradient_bytes, seconds * state.weight_bytes)
            )
        else:  # all-reducing is reducing each rank's share, and gathering them
            reductions.append(Reduction(2 * seconds * state.gradient_bytes, 0.0))
    return reductions


@cache
def _elements(
    model: Model, stage: Stage, execution: Execution, final_norm: bool, tables: int
) -> tuple[int, int]:
    """Return the elements of parameters that all data-parallel ranks have, and of experts'
    parameters."""
    parameters = parameters_of_chunk(model, stage, execution, final_norm=final_norm, tables=tables)
    of_experts = sum(parameter.elements for parameter in parameters if parameter.of_experts)
    return sum(parameter.elements for parameter in parameters) - of_experts, of_experts


def seconds_of_a_byte(
    ranks: int, stride: int, rates: Rates, framework: Framework = Framework.MEGATRON
) -> float:
    """Return the seconds for each byte that ``ranks`` ranks, ``stride`` apart, scatter or gather.

    In a ring every rank sends all but its own share to the next. The ranks of a node form as many
    rings as they are, and each ring leaves the node by another rank's port. In plain PyTorch they
    are assumed to form one ring, at the speed of one port.
    """
    near = max(min(ranks, rates.domain // stride), 1)
    rings = near if framework is Framework.MEGATRON else 1
    within = 1 / rates.peers if near > 1 else 0.0
    slower = max(1.0, ranks / near / FULL_SPEED_NODES)
    between = slower / (rings * rates.network) if ranks > near else 0.0
    return (ranks - 1) / ranks * max(within, between)
