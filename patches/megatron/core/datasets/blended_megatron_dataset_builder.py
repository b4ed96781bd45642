"""Ranks that read data build datasets, which the caller's script does not always see.

Global rank 0 builds the indices for all, and tells all whether there is anything to train on:
without a dataset of its own the run would end at once, with exit code 0 and not one step trained.
And where attention stays within documents, every stage reads where they begin and end: Megatron's
own script builds such data for the first and the last stage, which in a line of two ranks are all.

Not patched: the scripts' functions that tell which ranks build datasets.
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
            "BlendedMegatronDatasetBuilder.__init__",
            build_where_read,
            reason="global rank 0 decides whether to train, and all stages read where packed "
            "documents end",
            signature="(self, cls, sizes, is_built_on_rank, config)",
        ),
    )


def build_where_read(
    original: Callable[..., None],
    builder: Any,
    cls: type,
    sizes: list[int],
    is_built_on_rank: Callable[[], bool],
    config: Any,
) -> None:
    all_stages_read = getattr(config, "inter_document_masking", False)  # since Megatron 0.19

    def is_built() -> bool:
        reads = all_stages_read and parallel_state.get_tensor_model_parallel_rank() == 0
        return reads or is_built_on_rank() or dist.get_rank() == 0

    original(builder, cls, sizes, is_built, config)
