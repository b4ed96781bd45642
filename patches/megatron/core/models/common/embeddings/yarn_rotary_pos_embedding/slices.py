"""Yarn's cached cosines and sines that begin at the start of the running slice.

Megatron's fused kernels of latent attention use these.
"""

from __future__ import annotations

from megatron_ext.adapter.slices.positions import begin_at_slice
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch by which rotary positions begin at a slice's place in its sequence."""
    return (
        wrap(
            "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:"
            "YarnRotaryEmbedding.get_cached_cos_sin",
            begin_at_slice,
            reason="positions of a slice begin at the slice's first token",
        ),
    )
