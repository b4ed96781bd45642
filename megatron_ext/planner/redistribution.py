"""Layers moved away from the output layer, as Megatron's flags for that do.

The last stage also has the output layer, which may take as long as several layers. Megatron can
count it as a layer when it divides the model; costs that were given for equal stages are
redistributed in the same way.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.schedule.costs import Costs


def tells_vocabulary(costs: Costs) -> bool:
    """Return whether ``costs`` give the seconds of embedding and output layer separately."""
    vocabulary = costs.vocabulary
    return vocabulary is not None and any((*vocabulary.output_layer, *vocabulary.embedding))


def redistributed_layers(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage if the output layer counts as a layer, as Megatron can.

    The flag is ``--account-for-loss-in-pipeline-split``. The embedding counts too if the layers
    divide only then (``--account-for-embedding-in-pipeline-split``).

    Raises:
        ValueError: the layers are not divisible in either way.
    """
    for embeddings in (0, 1):
        on_each, left = divmod(layers + 1 + embeddings, stages)
        if not left:
            break
    else:
        raise ValueError(
            f"{layers} layers and the output layer cannot be split evenly over {stages} stages, "
            "neither without nor with the embedding counted as a layer; Megatron can split "
            f"{_numbers_that_divide(layers, stages)} layers in this way"
        )
    counts = [on_each] * stages
    counts[0] -= embeddings
    counts[-1] -= 1
    return counts


def redistribute(costs: Costs, layers: int) -> Costs:
    """Return ``costs`` of ``layers`` equal layers after Megatron's redistribution of the layers.

    Each stage has the number of layers that `redistributed_layers` returns.

    Raises:
        ValueError: the layers are not divisible.
    """
    counts = redistributed_layers(layers, costs.stages)
    alone = costs.layers_alone
    moved = replace(
        alone,
        passes=alone.passes.spread(layers, counts),
        slices=alone.slices.spread(layers, counts, alone),
    )
    if costs.tower is not None:
        moved = moved.with_tower(costs.tower)
    return moved if costs.vocabulary is None else moved.with_vocabulary(costs.vocabulary)


def _numbers_that_divide(layers: int, stages: int) -> str:
    """Return, as text, the numbers of layers nearest to ``layers`` that Megatron can
    redistribute."""
    fit = [
        n for n in range(1, layers + stages + 1) if (n + 1) % stages == 0 or (n + 2) % stages == 0
    ]
    below, above = [n for n in fit if n < layers], [n for n in fit if n > layers]
    return " or ".join(map(str, [*below[-1:], above[0]]))
