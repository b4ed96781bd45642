"""What of a step comes on top of its passes: the optimizer, and reductions that no pass hides.

It is charged to all schedules and layouts alike, by what a rank has of the model.
"""

from __future__ import annotations

from megatron_ext.schedule.model.model_memory import ModelBytes, TrainingState
from megatron_ext.schedule.model.rates import Rates


def seconds_beside(model: ModelBytes, state: TrainingState, rates: Rates) -> float:
    """Of a step on a rank that has ``model``.

    The optimizer reads gradients and clears them, reads and writes its states, and writes weights.
    Data-parallel ranks add up gradients and gather weights: where passes hide that, all but the
    last bucket; else everything.
    """
    moved = 2 * model.gradients + 2 * model.optimizer + model.weights
    return moved / rates.memory + _exposed_bytes(model, state) / rates.network


def _exposed_bytes(model: ModelBytes, state: TrainingState) -> float:
    ranks = state.data_parallel
    if ranks == 1:
        return 0.0
    gathered = model.weights if state.distributed else model.gradients  # as a sum is, again
    whole = model.gradients + gathered
    if state.bucket:
        of_bucket = state.bucket * (state.gradient_bytes + state.weight_bytes)
        whole = min(whole, of_bucket)
    return whole * (ranks - 1) / ranks
