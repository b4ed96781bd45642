"""Batches for context-parallel ranks: each rank gets its part of every slice.

Not patched: who calls this, on which ranks, and how Megatron cuts batches without slices.
"""

from __future__ import annotations

from megatron_ext.adapter.slices.context_parallel import cut_by_slices
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that gives a context-parallel rank its part of each slice of a sequence."""
    return (
        wrap(
            "megatron.core.utils:get_batch_on_this_cp_rank",
            cut_by_slices,
            reason="a context-parallel rank must have a part of each slice of a sequence",
        ),
    )
