"""Layers of hybrid models beside attention and MLP, counted as theirs are in estimate.py.

Operations without weights are Megatron's figures (its num_floating_point_operations).
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.schedule.model.estimate import (
    LayerWork,
    ModelDimensions,
    Pair,
    divided,
    normed,
    unsplit,
)


def experts(
    model: ModelDimensions, *, routed: int, width: int, shared_width: int, latent: int
) -> LayerWork:
    """Experts of ``width``, to ``routed`` of which a token goes, and a shared one.

    ``latent``: the width in which experts work, 0 for the model's own. The router does not count;
    where it is captured alone, so is the shared expert. Nor does what tokens take on their way.
    """
    matrices = 3 if model.gated else 2
    inner = latent or model.hidden
    to_latent = 2 * model.hidden * latent
    weights = matrices * (routed * inner * width + model.hidden * shared_width) + to_latent
    entering = routed * inner + (model.hidden if shared_width else 0)
    activation = matrices * (routed * width + shared_width)
    is_again = "moe" in model.recompute_modules
    work = LayerWork(
        weights=weights,
        again=2 * weights if is_again else 0,
        widths=2 * entering + activation + (2 * (model.hidden + latent) if latent else 0),
        elements=normed(model) + (0 if is_again else entering + activation),
        masks=model.hidden,
    )
    shared = matrices * model.hidden * shared_width
    if shared_width:
        widths = 2 * model.hidden + matrices * shared_width
        pair = Pair(shared, widths, model.hidden * shared_width, shared_width)
        work = divided(work, model, pair)
    if "moe" in model.captured:
        return unsplit(work)
    if "moe_router" in model.captured and shared_width and not work.fused:
        left = work.widths - 2 * model.hidden - matrices * shared_width
        return replace(work, fused=shared, widths=left, whole=0, rows=0)
    return work


def delta_net(model: ModelDimensions, *, keys: int, values: int, heads: int) -> LayerWork:
    """A gated delta net whose queries and keys are ``keys`` wide, all heads together, and its
    values and gates ``values``, on ``heads`` heads."""
    projected = 2 * keys + 2 * values + 2 * heads
    state = values * (values // heads)
    weights, widths = model.hidden * (projected + values), 2 * model.hidden + projected + values
    work = LayerWork(
        weights=weights,
        core=8 * state,
        widths=widths,
        elements=normed(model) + 2 * projected + values,  # before and after its convolution
        masks=model.hidden,
    )
    work = divided(work, model, Pair(weights, widths, model.hidden * values, values))
    return unsplit(work) if "attn" in model.captured else work


def mamba(model: ModelDimensions, *, width: int, state: int, groups: int, heads: int) -> LayerWork:
    """A Mamba layer of ``width``, all heads together, with so many states a channel."""
    projected = 2 * width + 2 * groups * state + heads
    weights, widths = model.hidden * (projected + width), 2 * model.hidden + projected + width
    work = LayerWork(
        weights=weights,
        core=7 * width * state,
        widths=widths,
        elements=normed(model) + 2 * projected + width,  # likewise
        masks=model.hidden,
    )
    work = divided(work, model, Pair(weights, widths, model.hidden * width, width))
    return unsplit(work) if "mamba" in model.captured else work
