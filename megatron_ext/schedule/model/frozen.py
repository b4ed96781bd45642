"""What a model costs of which not all is trained: adapters beside frozen layers, frozen towers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import Held


def without_frozen(
    costs: Costs, matrices: Sequence[float], *, first_stage: bool, head: bool
) -> Costs:
    """``costs``, those of training everything, without what is not done for frozen weights.

    A frozen weight has no W, and keeps nothing for it. Where nothing of the first stage is trained
    it has no I either; later stages pass the gradient on, since what is before them needs it, or
    Megatron takes it to.

    Args:
        matrices: how much of each stage's layers is trained, from 0 to 1.
        first_stage: whether anything of the first stage is.
        head: whether the output layer is.
    """

    if first_stage and head and all(share == 1 for share in matrices):
        return costs

    def shared(figures: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(figure * share for figure, share in zip(figures, matrices, strict=True))

    layers = costs.without_vocabulary()
    seconds = dict(layers.seconds)
    seconds[Kind.BACKWARD_WEIGHT] = shared(seconds[Kind.BACKWARD_WEIGHT])
    if not first_stage:
        seconds[Kind.BACKWARD_INPUT] = (0.0, *seconds[Kind.BACKWARD_INPUT][1:])
    held = layers.held_bytes
    if held is not None:
        held = {**held, Held.WEIGHT_INPUTS: shared(held[Held.WEIGHT_INPUTS])}
    changed = replace(layers, seconds=seconds, held_bytes=held)
    vocabulary = costs.vocabulary
    if vocabulary is not None:
        forward, input_gradient, weight_gradient = vocabulary.head
        of_head = (forward, input_gradient, weight_gradient if head else 0.0)
        changed = changed.with_vocabulary(replace(vocabulary, head=of_head))
    return changed.with_copies_of(costs)
