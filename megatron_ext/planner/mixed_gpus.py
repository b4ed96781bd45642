"""Pipelines whose ranks have GPUs of several types.

Costs are estimated for one type; the others count as ranks of another speed, by the time that the
model's layers take on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.gpus import Gpu
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.stage_seconds import seconds_of_layers
from megatron_ext.schedule.rank_speeds import RankSpeeds

ASSUMED_GPU = "times are an H100's, and its memory is not compared: --gpu names yours"


def reference_of(gpus: Sequence[Gpu]) -> Gpu:
    """Return the GPU for which costs are estimated if ranks have several types of GPU.

    It is the first of ``gpus``, with as much memory as the GPU that has least.
    """
    sizes = [gpu.memory for gpu in gpus]
    known = [size for size in sizes if size is not None]
    return replace(gpus[0], memory=min(known) if len(known) == len(sizes) else None)


def speeds_of_gpus(gpus: Sequence[Gpu], model: Model, execution: Execution) -> RankSpeeds | None:
    """Return the speed of each rank's GPU relative to the first; None if all are of one type.

    A speed follows from the time of all layers of ``model`` on the GPU.

    Raises:
        ValueError: a GPU has no units for the precision.
    """
    if len(set(gpus)) == 1:
        return None
    all_layers = Stage(model.layers)

    def seconds(gpu: Gpu) -> float:
        rates = gpu.rates(execution.precision)
        return sum(seconds_of_layers(model, all_layers, execution, rates).totals)

    of_types = {gpu: seconds(gpu) for gpu in set(gpus)}
    first = of_types[gpus[0]]
    return RankSpeeds(tuple(round(first / of_types[gpu], 4) for gpu in gpus))


def product_of(speeds: Sequence[RankSpeeds | None], ranks: int) -> RankSpeeds | None:
    """Return each rank's product of several relative speeds; None if all ``speeds`` are None.

    Raises:
        ValueError: some speeds are for another number of ranks.
    """
    given = [of_ranks.of_ranks(ranks) for of_ranks in speeds if of_ranks is not None]
    if not given:
        return None
    product = (1.0,) * ranks
    for of_ranks in given:
        product = tuple(a * b for a, b in zip(product, of_ranks, strict=True))
    return RankSpeeds(product)
