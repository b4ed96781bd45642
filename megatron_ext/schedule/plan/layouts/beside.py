"""What of a step comes on top of its passes: the optimizer, and reductions that no pass hides.

It is charged to all schedules and layouts alike, by what a rank has of the model.
"""

from __future__ import annotations

from megatron_ext.schedule.model.model_memory import ModelBytes, TrainingState
from megatron_ext.schedule.model.rates import Rates
from megatron_ext.schedule.model.reductions import seconds_of_a_byte


def seconds_beside(
    model: ModelBytes, state: TrainingState, tensor_parallel: int, rates: Rates
) -> float:
    """Of a step on a rank that has ``model``.

    The optimizer reads gradients and clears them, reads and writes its states, and writes weights.
    Data-parallel ranks add up gradients and gather weights: where passes hide that, all but the
    last bucket; else everything.
    """
    moved = 2 * model.gradients + 2 * model.optimizer + model.weights
    a_byte = seconds_of_a_byte(state.data_parallel, tensor_parallel, rates)
    return moved / rates.memory + _exposed_bytes(model, state) * a_byte


def _exposed_bytes(model: ModelBytes, state: TrainingState) -> float:
    gathered = model.weights if state.distributed else model.gradients  # as a sum is, again
    whole = model.gradients + gathered
    if state.bucket:
        of_bucket = state.bucket * (state.gradient_bytes + state.weight_bytes)
        whole = min(whole, of_bucket)
    return whole
