"""Microbatches in another order than that of arrival, dealt to replicas by their cost.

The function that builds a loader is patched, because it knows whether the dataset is the training
split. Samplers do not: they also serve evaluation.

Not patched: the samplers; loaders of validation and test data; ``cyclic`` and ``external`` loaders,
which are refused (`check_arrangement`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.datasets.utils import Split

from megatron_ext.config import PipelineConfig
from megatron_ext.features.arrangement.adapter.arranged_batches import arrange_loader
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that orders training microbatches by cost and deals them to replicas."""

    def build(original: Callable[..., Any], dataset: Any, consumed_samples: int) -> Any:
        loader = original(dataset, consumed_samples)
        split = getattr(dataset, "split", getattr(dataset, "index_split", None))
        if loader is not None and split is Split.train:
            arrange_loader(loader, dataset, config)
        return loader

    return (
        wrap(
            "megatron.training.datasets.data_samplers:build_pretraining_data_loader",
            build,
            reason="order microbatches by their cost, and deal them to data-parallel replicas",
            signature="(dataset, consumed_samples)",
        ),
    )
