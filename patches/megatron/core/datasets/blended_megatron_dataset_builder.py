"""Datasets built by the ranks that read them, and by global rank 0, which then drops unread ones.

Global rank 0 builds the indices for all ranks. If it reads no data itself, as on a V, its datasets
are dropped afterwards: a loader that its data-parallel peers do not have would wait for them. If
attention stays within documents, every stage must know where documents begin and end. Megatron's
own script builds such data only for the first and the last stage, which is enough if there are no
other stages.

Not patched: the scripts' functions that tell which ranks build datasets; builders of other data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that lets global rank 0, and every rank that reads a dataset, build it."""
    return (
        wrap(
            "megatron.core.datasets.blended_megatron_dataset_builder:"
            "BlendedMegatronDatasetBuilder.build",
            build_where_read,
            reason="global rank 0 builds indices for all, and all stages read where packed "
            "documents end",
            signature="(self)",
        ),
    )


def build_where_read(original: Callable[[Any], list[Any]], builder: Any) -> list[Any]:
    """Build the datasets that this rank reads; global rank 0 also builds all others.

    Datasets that this rank does not read are returned as None.
    """
    is_built_on_rank = builder.is_built_on_rank
    # Megatron 0.18 has no setting inter_document_masking.
    all_stages_read = getattr(builder.config, "inter_document_masking", False)

    def is_read() -> bool:
        reads = all_stages_read and parallel_state.get_tensor_model_parallel_rank() == 0
        return reads or is_built_on_rank()

    builder.is_built_on_rank = lambda: is_read() or dist.get_rank() == 0
    try:
        datasets = original(builder)
    finally:
        builder.is_built_on_rank = is_built_on_rank
    return datasets if is_read() else _without(datasets)


def _without(datasets: list[Any]) -> list[Any]:
    """Return ``datasets`` with None for each dataset; a split may be a list of validation sets."""
    return [_without(split) if isinstance(split, list) else None for split in datasets]
