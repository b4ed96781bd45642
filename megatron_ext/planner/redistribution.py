"""Layers moved away from the output layer, as Megatron's flags for that spread them.

The last stage also has the output layer, which may take as long as several layers. Megatron can
count it as a layer when it divides the model; costs that were given for equal stages are
redistributed in the same way.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.schedule.costs import Costs


def tells_vocabulary(costs: Costs) -> bool:
    """Return whether ``costs`` have the seconds of embedding and output layer apart from those of
    the layers."""
    vocabulary = costs.vocabulary
    return vocabulary is not None and any((*vocabulary.output_layer, *vocabulary.embedding))


def redistributed_layers(layers: int, stages: int) -> list[int]:
    """Return ``layers`` on each stage as Megatron spreads them if the output layer counts as one
    (``--account-for-loss-in-pipeline-split``), and the embedding too if they divide only then
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
            f"{layers} layers and the output layer cannot be split evenly over {stages} stages, "
            f"nor can they together with the embedding; Megatron can place "
            f"{_numbers_that_divide(layers, stages)} layers so"
        )
    counts = [on_each] * stages
    counts[0] -= embeddings
    counts[-1] -= 1
    return counts


def redistribute(costs: Costs, layers: int) -> Costs:
    """Return ``costs`` of ``layers`` equal layers with each stage's number of layers as Megatron
    redistributes them (`redistributed_layers`).

    Raises:
        ValueError: they do not divide.
    """
    counts = redistributed_layers(layers, costs.stages)
    alone = costs.layers_alone
    moved = replace(alone, passes=alone.passes.spread(layers, counts))
    if costs.tower is not None:
        moved = moved.with_tower(costs.tower)
    return moved if costs.vocabulary is None else moved.with_vocabulary(costs.vocabulary)


def _numbers_that_divide(layers: int, stages: int) -> str:
    """Return text with the numbers of layers that can be redistributed, below and above
    ``layers``."""
    fit = [
        n for n in range(1, layers + stages + 1) if (n + 1) % stages == 0 or (n + 2) % stages == 0
    ]
    below, above = [n for n in fit if n < layers], [n for n in fit if n > layers]
    return " or ".join(map(str, [*below[-1:], above[0]]))
