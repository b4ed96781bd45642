"""What can be done about embedding and output layer, side by side for each schedule."""

from __future__ import annotations

from collections.abc import Callable

from megatron_ext.schedule.build.registry import choose
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.plan.candidate import Variant, VocabMethod, goes_with, keeps_pairs
from megatron_ext.schedule.plan.planner import VariantOf
from megatron_ext.schedule.problem import Extras, Problem
from megatron_ext.schedule.slices import UNCUT, Slices


def tells_vocabulary(costs: Costs) -> bool:
    """Whether ``costs`` tell embedding and output layer apart from the layers beside them."""
    vocabulary = costs.vocabulary
    return vocabulary is not None and any((*vocabulary.head, *vocabulary.embedding))


def variants_of(
    ranks: int,
    microbatches: int,
    costs: Callable[[Placement], Costs],
    limit: MemoryLimit | None,
    layers: int | None = None,
    post_validation: bool = False,
    slices: Slices = UNCUT,
    pairs: bool = False,
) -> VariantOf:
    """The problem of each family with each method that can be told from ``costs``, for `make_plan`.

    Args:
        costs: the costs on a placement, so that each has its own number of stages.
        layers: of the model, for the layers to be redistributed.
        pairs: whether passes may run in pairs.
    """

    def variant(name: str, method: VocabMethod) -> Variant | None:
        choice = choose(name)
        if not goes_with(slices, choice, method.vocabulary):
            return None
        placement = choice.place(ranks)
        of_stages = costs(placement)
        if method is not VocabMethod.NAIVE and not tells_vocabulary(of_stages):
            return None
        if method is VocabMethod.REDISTRIBUTED:
            if layers is None:
                return None
            of_stages = redistribute(of_stages, layers)
        problem = Problem(
            placement,
            microbatches,
            of_stages,
            limit,
            extras=Extras(
                vocab_parallel=method.vocabulary,
                post_validation=post_validation,
                slices=slices,
                pairs=pairs and keeps_pairs(choice, method.vocabulary),
            ),
        )
        return Variant(choice, problem, may_recompute=True)

    return variant


def redistributed_layers(layers: int, stages: int) -> list[int]:
    """``layers`` on each stage, as Megatron spreads them when the output layer counts as one
    (``--account-for-loss-in-pipeline-split``), and the embedding too if only then they divide
    (``--account-for-embedding-in-pipeline-split``).

    Raises:
        ValueError: they do not divide.
    """
    for embeddings in (0, 1):
        on_each, left = divmod(layers + 1 + embeddings, stages)
        if not left:
            break
    else:
        raise ValueError(
            f"{layers} layers and the output layer do not divide over {stages} stages, nor with "
            f"the embedding: Megatron redistributes {_numbers_that_divide(layers, stages)} layers"
        )
    counts = [on_each] * stages
    counts[0] -= embeddings
    counts[-1] -= 1
    return counts


def redistribute(costs: Costs, layers: int) -> Costs:
    """``costs`` of ``layers`` equal layers with as many on each stage as Megatron puts there
    (`redistributed_layers`).

    Raises:
        ValueError: they do not divide.
    """
    counts = redistributed_layers(layers, costs.stages)
    alone = costs.without_vocabulary()

    def spread(figures: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(figures) / layers * count for count in counts)

    held = alone.held_bytes
    if held is not None:
        held = {kind: spread(figures) for kind, figures in held.items()}
    seconds = {kind: spread(figures) for kind, figures in alone.seconds.items()}
    again = alone.passes.recompute and spread(alone.passes.recompute)
    moved = alone.with_passes(seconds=seconds, held_bytes=held, recompute=again)
    return moved if costs.vocabulary is None else moved.with_vocabulary(costs.vocabulary)


def _numbers_that_divide(layers: int, stages: int) -> str:
    """Numbers of layers that can be redistributed, below and above ``layers``."""
    fit = [
        n for n in range(1, layers + stages + 1) if (n + 1) % stages == 0 or (n + 2) % stages == 0
    ]
    below, above = [n for n in fit if n < layers], [n for n in fit if n > layers]
    return " or ".join(map(str, [*below[-1:], above[0]]))
