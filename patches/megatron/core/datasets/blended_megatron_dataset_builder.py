"""Datasets are built by the ranks that read them, and by global rank 0, which gives its own away.

Global rank 0 builds the indices for all. Where it reads nothing, as on a V, it gets no dataset, as
any other rank that reads nothing: a loader that its data-parallel peers lack would wait for them.
And where attention stays within documents, every stage reads where they begin and end: Megatron's
own script builds such data for the first and the last stage, which in a line of two ranks are all.

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
    """The patch that makes more ranks build datasets."""
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
    """Build the datasets that this rank reads or that others need; return those that it reads."""
    is_built_on_rank = builder.is_built_on_rank
    all_stages_read = getattr(builder.config, "inter_document_masking", False)  # since 0.19

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
    """As many Nones, where a split may be a list of validation sets."""
    return [_without(split) if isinstance(split, list) else None for split in datasets]
