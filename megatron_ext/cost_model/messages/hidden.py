"""What hides where F of one microbatch and a backward pass of another run as one: a pair.

Their layers run side by side, the first of F beside the last of the backward pass, as many as both
have. While one side's tokens are on their way to experts, or back, the other side computes. That is
Megatron's `--overlap-moe-expert-parallel-comm`: messages have a stream of their own, and W is
either kept back or in the pair, where messages go on beside it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.measured.scale import PASS
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.operations.operation import Group
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.stage_seconds import PassSeconds, seconds_by_component
from megatron_ext.schedule.action import Kind

Table = tuple[tuple[float, ...], ...]  # seconds, by stage of F, then by stage of the other pass


@dataclass(frozen=True)
class PairedLayer:
    """Seconds of a layer's F, I and W: what they compute, and what they wait for experts' ranks."""

    forward: float
    input_gradient: float
    weight_gradient: float
    forward_messages: float
    input_gradient_messages: float

    def hidden_beside(self, other: PairedLayer, share: float, *, with_weights: bool) -> float:
        """Of this one's F beside the ``other``'s backward pass.

        Args:
            share: of messages, how much of their time goes on beside other work.
            with_weights: whether W is in the pair.
        """
        weights = other.weight_gradient if with_weights else 0.0
        there = min(share * self.forward_messages, other.input_gradient + weights)
        back = min(share * other.input_gradient_messages, self.forward + weights)
        return min(there + back, self.forward + other.input_gradient + weights)


def paired_layers(
    model: Model, stage: Stage, execution: Execution, rates: Rates
) -> tuple[PairedLayer, ...]:
    """The layers of ``stage``, multi-token prediction's behind the others."""
    return tuple(
        _paired_layer(seconds)
        for component, seconds in seconds_by_component(model, stage, execution, rates)
        if component != PASS
    )


def _paired_layer(seconds: PassSeconds) -> PairedLayer:
    there = seconds.forward.get(Group.EXPERT, 0.0)
    back = seconds.input_gradient.get(Group.EXPERT, 0.0)
    forward, input_gradient, weight_gradient = seconds.totals
    return PairedLayer(forward - there, input_gradient - back, weight_gradient, there, back)


def hidden_by_pairs(
    model: Model, stages: Sequence[Stage], execution: Execution, rates: Rates
) -> Mapping[Kind, Table]:
    """Seconds that F of each of ``stages`` and a backward pass of each other take less side by side
    than one after the other, by the kind of that: `OverlapCosts.hidden`.
    """
    share = execution.overlap
    layers = [paired_layers(model, stage, execution, rates) for stage in stages]

    @cache
    def hidden(there: int, back: int, with_weights: bool) -> float:
        beside = zip(layers[there], reversed(layers[back]), strict=False)
        return sum(f.hidden_beside(b, share, with_weights=with_weights) for f, b in beside)

    def table(with_weights: bool) -> Table:
        numbers = range(len(stages))
        return tuple(tuple(hidden(f, b, with_weights) for b in numbers) for f in numbers)

    return {
        Kind.BACKWARD_INPUT: table(with_weights=False),
        Kind.FULL_BACKWARD: table(with_weights=True),
    }
