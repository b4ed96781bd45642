"""Yarn's cached cosines and sines begin where the slice of a sequence does that a pass is about.

Megatron's fused kernels of latent attention take these.
"""

from __future__ import annotations

from megatron_ext.adapter.slices.positions import begin_at_slice
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch that moves positions on."""
    return (
        wrap(
            "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:"
            "YarnRotaryEmbedding.get_cached_cos_sin",
            begin_at_slice,
            reason="the positions of a slice begin where it does",
        ),
    )
