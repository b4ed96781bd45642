"""Seconds of a step outside its passes: the optimizer, and reductions that no pass hides.

They are added for all schedules, layouts and parallel sizes alike, by the part of the model that a
rank has.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution, Framework
from megatron_ext.cost_model.model import Model, stages_of
from megatron_ext.cost_model.model_memory import ModelBytes, TrainingState
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.reductions import seconds_of_a_byte
from megatron_ext.schedule.action import Kind

_FP32 = 4  # bytes of an fp32 number


@dataclass(frozen=True)
class RankPasses:
    """Seconds of a microbatch's passes on a pipeline rank, as the mean of all ranks.

    Attributes:
        forward: seconds of the forward passes of all stages of the rank.
        backward: seconds of the backward passes, for inputs and for weights.
    """

    forward: float
    backward: float


def rank_passes(model: Model, execution: Execution, rates: Rates, ranks: int) -> RankPasses:
    """Return the mean seconds of a microbatch's passes on one of ``ranks`` pipeline ranks."""
    costs = estimate(model, stages_of(model, [len(model.layers)]), execution, rates)
    forward, *backward = (
        costs.seconds[kind][0] / ranks
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    return RankPasses(forward, sum(backward))


def seconds_outside_passes(
    model: ModelBytes,
    state: TrainingState,
    execution: Execution,
    rates: Rates,
    passes: RankPasses | None = None,
) -> float:
    """Return the seconds of a step that a rank spends in the optimizer and in exposed reductions.

    ``model`` has the bytes of the rank's part of the model. The optimizer reads gradients and
    clears them, reads and writes its states, and writes weights. Data-parallel ranks add up
    gradients and gather weights. If passes hide that, the last bucket is exposed, and as much of
    the rest as takes longer than the ``passes`` of one microbatch; if not, all of it is. Experts
    are reduced over the ranks with the same experts.

    Args:
        passes: the rank's passes of one microbatch; None: nothing overlaps with them.
    """
    moved = 2 * model.gradients + 2 * model.optimizer + model.weights
    dense = model.gathered - model.expert_gathered, model.gradients - model.expert_gradients
    experts = model.expert_gathered, model.expert_gradients
    of_experts = execution.expert_tensor_parallel * execution.expert_parallel
    each_dense = seconds_of_a_byte(
        state.data_parallel, execution.tensor_parallel, rates, execution.framework
    )
    each_of_experts = seconds_of_a_byte(
        state.expert_data_parallel, of_experts, rates, execution.framework
    )
    seconds = moved / rates.memory
    seconds += _exposed_bytes(*dense, state, execution.framework) * each_dense
    seconds += _exposed_bytes(*experts, state, execution.framework) * each_of_experts
    if not state.bucket:
        return seconds
    assert passes is not None

    def overlappable(dense: float, experts: float, element: float) -> float:
        # The reduction of the last bucket is counted elsewhere, as it never overlaps a pass.
        rest = max(dense - state.bucket * element, 0.0)
        return rest * each_dense + experts * each_of_experts

    reduction = overlappable(dense[1], experts[1], state.gradient_bytes)
    # An all-reduce sends the bytes twice, once to sum and once to distribute.
    if not state.distributed:
        return seconds + max(2 * reduction - passes.backward, 0.0)
    gather = overlappable(dense[0], experts[0], state.gathered_bytes)
    return seconds + max(reduction - passes.backward, 0.0) + max(gather - passes.forward, 0.0)


def _exposed_bytes(
    gathered: float, gradients: float, state: TrainingState, framework: Framework
) -> float:
    # Plain PyTorch sums all gradients in fp32 after the passes, and gathers weights.
    if framework is Framework.PYTORCH:
        return 2 * gradients * _FP32 / state.gradient_bytes + gathered * state.distributed
    # An all-reduce of gradients sends their bytes twice.
    exposed = gradients + (gathered if state.distributed else gradients)
    if state.bucket:
        of_bucket = state.bucket * (state.gradient_bytes + state.gathered_bytes)
        exposed = min(exposed, of_bucket)
    return exposed
