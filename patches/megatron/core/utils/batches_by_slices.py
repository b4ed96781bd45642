"""Ranks that share sequences have a part of each slice.

Not patched: who calls it, on which ranks, and what Megatron cuts where no slice runs.
"""

from __future__ import annotations

from megatron_ext.adapter.slices.context_parallel import cut_by_slices
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch that cuts batches."""
    return (
        wrap(
            "megatron.core.utils:get_batch_on_this_cp_rank",
            cut_by_slices,
            reason="ranks that share a sequence have a part of each slice of it",
        ),
    )
