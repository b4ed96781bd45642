"""Time saved by running F of one microbatch and a backward pass of another as one: a pair.

The layers of the two passes run side by side, the first layer of F with the last layer of the
backward pass, as many as both have. While one side's tokens are on their way to experts or back,
the other side computes. Megatron's `--overlap-moe-expert-parallel-comm` does this: messages have a
separate stream, and W is either deferred or inside the pair, where it overlaps messages too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.measured.scale import PASS
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.operations.operation import Group
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.stage_seconds import PassSeconds, seconds_by_component
from megatron_ext.schedule.action import Kind

# Seconds that overlapped passes save, by the stage of the forward pass and then by the stage of the
# backward pass.
SecondsByStages = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class PairedLayer:
    """Seconds of compute in a layer's F, I and W, and seconds that F and I wait for experts'
    messages."""

    forward: float
    input_gradient: float
    weight_gradient: float
    forward_messages: float
    input_gradient_messages: float

    def saving_with(self, other: PairedLayer, share: float, *, with_weights: bool) -> float:
        """Return the seconds saved if this layer's F overlaps the ``other`` layer's backward pass.

        Args:
            share: share of the messages' time that can overlap other work.
            with_weights: whether the backward pass includes W.
        """
        weights = other.weight_gradient if with_weights else 0.0
        in_forward = min(share * self.forward_messages, other.input_gradient + weights)
        in_backward = min(share * other.input_gradient_messages, self.forward + weights)
        # W may be counted in both terms, so their sum is limited to the computing time of both
        # passes.
        return min(in_forward + in_backward, self.forward + other.input_gradient + weights)


@lru_cache(maxsize=4096)  # the result is cached, since layouts have the same stages many times
def paired_layers(
    model: Model, stage: Stage, execution: Execution, rates: Rates
) -> tuple[PairedLayer, ...]:
    """Return the layers of ``stage`` for overlapped passes, then those of multi-token
    prediction."""
    return tuple(
        _paired_layer(seconds)
        for component, seconds in seconds_by_component(model, stage, execution, rates)
        if component != PASS
    )


def _paired_layer(seconds: PassSeconds) -> PairedLayer:
    in_forward = seconds.forward.get(Group.EXPERT, 0.0)
    in_backward = seconds.input_gradient.get(Group.EXPERT, 0.0)
    forward, input_gradient, weight_gradient = seconds.totals
    return PairedLayer(
        forward - in_forward,
        input_gradient - in_backward,
        weight_gradient,
        in_forward,
        in_backward,
    )


def hidden_share(execution: Execution, rates: Rates) -> float:
    """Return the share of the time of experts' messages that overlapped passes can hide."""
    if execution.dispatcher != "alltoall":
        return execution.overlap
    reached = rates.overlap_in_one_queue if execution.has_one_queue else rates.overlap
    return min(execution.overlap, reached)


def hidden_by_pairs(
    model: Model, stages: Sequence[Stage], execution: Execution, rates: Rates
) -> Mapping[Kind, SecondsByStages]:
    """Return the seconds saved by overlapping F of every stage with a backward pass of every stage.

    The tables are by the kind of the backward pass, as `OverlapCosts.savings`.
    """
    share = hidden_share(execution, rates)
    layers = [paired_layers(model, stage, execution, rates) for stage in stages]

    @cache
    def saving(forward: int, backward: int, with_weights: bool) -> float:
        # If one stage has more layers than the other, its additional layers run without overlap.
        side_by_side = zip(layers[forward], reversed(layers[backward]), strict=False)
        return sum(f.saving_with(b, share, with_weights=with_weights) for f, b in side_by_side)

    def table(with_weights: bool) -> SecondsByStages:
        numbers = range(len(stages))
        return tuple(tuple(saving(f, b, with_weights) for b in numbers) for f in numbers)

    return {
        Kind.BACKWARD_INPUT: table(with_weights=False),
        Kind.FULL_BACKWARD: table(with_weights=True),
    }
