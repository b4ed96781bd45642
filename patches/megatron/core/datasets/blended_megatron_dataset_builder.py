"""Global rank 0 builds the datasets too, whatever stages it has.

It builds the indices for all, and tells all whether there is anything to train on: without a
dataset of its own the run would end at once, with exit code 0 and not one step trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch that makes global rank 0 build datasets."""
    return (
        wrap(
            "megatron.core.datasets.blended_megatron_dataset_builder:"
            "BlendedMegatronDatasetBuilder.__init__",
            build_on_first_rank,
            reason="global rank 0 builds the indices and decides whether to train",
            signature="(self, cls, sizes, is_built_on_rank, config)",
        ),
    )


def build_on_first_rank(
    original: Callable[..., None],
    builder: Any,
    cls: type,
    sizes: list[int],
    is_built_on_rank: Callable[[], bool],
    config: Any,
) -> None:
    def is_built() -> bool:
        return is_built_on_rank() or dist.get_rank() == 0

    original(builder, cls, sizes, is_built, config)
