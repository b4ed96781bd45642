"""Seconds of a step outside its passes: the optimizer, and reductions that no pass hides.

They are added for all schedules and layouts alike, by the part of the model that a rank has.
"""

from __future__ import annotations

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.model_memory import ModelBytes, TrainingState
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.reductions import seconds_of_a_byte


def seconds_outside_passes(
    model: ModelBytes, state: TrainingState, execution: Execution, rates: Rates
) -> float:
    """Return the seconds on a rank that has ``model``.

    The optimizer reads gradients and clears them, reads and writes its states, and writes weights.
    Data-parallel ranks add up gradients and gather weights. If passes hide that, all but the last
    bucket is hidden; if not, nothing is. Experts are reduced over the ranks with the same experts.
    """
    moved = 2 * model.gradients + 2 * model.optimizer + model.weights
    dense = model.weights - model.expert_weights, model.gradients - model.expert_gradients
    experts = model.expert_weights, model.expert_gradients
    of_experts = execution.expert_tensor_parallel * execution.expert_parallel
    exposed = _exposed_bytes(*dense, state) * seconds_of_a_byte(
        state.data_parallel, execution.tensor_parallel, rates, execution.framework
    ) + _exposed_bytes(*experts, state) * seconds_of_a_byte(
        state.expert_data_parallel, of_experts, rates, execution.framework
    )
    return moved / rates.memory + exposed


def _exposed_bytes(weights: float, gradients: float, state: TrainingState) -> float:
    whole = gradients + (weights if state.distributed else gradients)  # as a sum is, again
    if state.bucket:
        of_bucket = state.bucket * (state.gradient_bytes + state.weight_bytes)
        whole = min(whole, of_bucket)
    return whole
