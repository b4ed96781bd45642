"""Costs of models with frozen weights: adapters on frozen layers, frozen towers.

A frozen weight has no gradient, so its W is not computed, and nothing is stored for it. Before the
first trained weight no input gradient is needed either. This work is subtracted from the costs
of training everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, OverlapCosts
from megatron_ext.schedule.kinds import Held


def without_frozen(
    costs: Costs, matrices: Sequence[float], *, reached: float, output_layer: bool
) -> Costs:
    """Return the ``costs`` of training everything, less the work that frozen weights save.

    A frozen weight has no W, and nothing is stored for its W. Layers before all trained layers have
    no I either, as far as they are on the first stage; later stages pass the gradient on, as
    Megatron's do.

    Args:
        matrices: trained share of each stage's layers, from 0 to 1.
        reached: share of the first stage's layers that need the gradient, from 0 to 1.
        output_layer: whether the output layer is trained.
    """

    if reached == 1 and output_layer and all(share == 1 for share in matrices):
        return costs

    def shared(figures: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(figure * share for figure, share in zip(figures, matrices, strict=True))

    def trained(seconds: Mapping[Kind, tuple[float, ...]]) -> dict[Kind, tuple[float, ...]]:
        first, *later = seconds[Kind.BACKWARD_INPUT]
        return {
            **seconds,
            Kind.BACKWARD_WEIGHT: shared(seconds[Kind.BACKWARD_WEIGHT]),
            Kind.BACKWARD_INPUT: (first * reached, *later),
        }

    layers = costs.layers_alone
    fixed = layers.slices.fixed
    held = layers.held_bytes
    if held is not None:
        held = {**held, Held.WEIGHT_INPUTS: shared(held[Held.WEIGHT_INPUTS])}
    saving = (
        shared(layers.passes.fused_backward_saving) if layers.passes.fused_backward_saving else ()
    )
    overlap_saving = dict(costs.overlap.savings)
    # The savings of overlaps with B are dropped: without the W of the frozen weights B is shorter,
    # and may hide no more of a forward pass than I does.
    overlap_saving.pop(Kind.FULL_BACKWARD, None)
    changed = replace(
        layers.with_passes(
            seconds=trained(layers.seconds), held_bytes=held, fused_backward_saving=saving
        ).with_slices(fixed=fixed and trained(fixed)),
        overlap=OverlapCosts(overlap_saving),
    )
    vocabulary = costs.vocabulary
    if vocabulary is not None:
        forward, input_gradient, weight_gradient = vocabulary.output_layer
        fixed_forward, fixed_input, fixed_weight = vocabulary.fixed_output_layer
        if not output_layer:
            weight_gradient = fixed_weight = 0.0
        changed = changed.with_vocabulary(
            replace(
                vocabulary,
                output_layer=(forward, input_gradient, weight_gradient),
                fixed_output_layer=(fixed_forward, fixed_input, fixed_weight),
            )
        )
    if costs.tower is not None:
        changed = changed.with_tower(costs.tower)
    return changed.with_copies_of(costs)
