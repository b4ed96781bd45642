"""Costs that are estimated in the way in which a launch estimates them before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ext.adapter.job import Listener, job_costs, of_arguments, of_built
from megatron_ext.adapter.model_parts import ChunkSize
from megatron_ext.config import ESTIMATE, CostsSource
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.placement import Placement


def costs_of_arguments(args: Any, placement: Placement) -> Costs:
    """Return the costs of the model in Megatron's parsed ``args``."""
    return job_costs(CostsSource(ESTIMATE), of_arguments(args, placement), 1)


def costs_of_model(
    config: Any,
    placement: Placement,
    per_stage: Sequence[ChunkSize],
    sequence: int,
    micro_batch: int,
    tell: Listener | None = None,
) -> Costs:
    """Return the costs of a built model on one node, without data parallelism."""
    ranks = placement.ranks
    job = of_built(config, placement, per_stage, sequence, micro_batch, ranks, stride=1)
    return job_costs(CostsSource(ESTIMATE), job, 1, tell)
