"""What a model costs of which not all is trained: adapters beside frozen layers, frozen towers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, OverlapCosts
from megatron_ext.schedule.kinds import Held


def without_frozen(costs: Costs, matrices: Sequence[float], *, reached: float, head: bool) -> Costs:
    """``costs``, those of training everything, without what is not done for frozen weights.

    A frozen weight has no W, and keeps nothing for it. What comes before all that is trained has no
    I either, as far as it is on the first stage; later ones pass the gradient on, as Megatron's do.

    Args:
        matrices: how much of each stage's layers is trained, from 0 to 1.
        reached: how much of the first stage's layers needs the gradient, from 0 to 1.
        head: whether the output layer is.
    """

    if reached == 1 and head and all(share == 1 for share in matrices):
        return costs

    def shared(figures: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(figure * share for figure, share in zip(figures, matrices, strict=True))

    layers = costs.layers_alone
    seconds = dict(layers.seconds)
    seconds[Kind.BACKWARD_WEIGHT] = shared(seconds[Kind.BACKWARD_WEIGHT])
    first, *later = seconds[Kind.BACKWARD_INPUT]
    seconds[Kind.BACKWARD_INPUT] = (first * reached, *later)
    held = layers.held_bytes
    if held is not None:
        held = {**held, Held.WEIGHT_INPUTS: shared(held[Held.WEIGHT_INPUTS])}
    spared = shared(layers.passes.spared) if layers.passes.spared else ()
    hidden = dict(costs.overlap.hidden)
    hidden.pop(Kind.FULL_BACKWARD, None)  # so little may be left of B that it hides no more than I
    changed = replace(
        layers.with_passes(seconds=seconds, held_bytes=held, spared=spared),
        overlap=OverlapCosts(hidden),
    )
    vocabulary = costs.vocabulary
    if vocabulary is not None:
        forward, input_gradient, weight_gradient = vocabulary.head
        of_head = (forward, input_gradient, weight_gradient if head else 0.0)
        changed = changed.with_vocabulary(replace(vocabulary, head=of_head))
    if costs.tower is not None:
        changed = changed.with_tower(costs.tower)
    return changed.with_copies_of(costs)
