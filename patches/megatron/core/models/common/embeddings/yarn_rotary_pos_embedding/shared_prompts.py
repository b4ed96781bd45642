"""Yarn's cached cosines and sines of a row in which answers share their prompts."""

from __future__ import annotations

from megatron_ext.config import PipelineConfig
from megatron_ext.features.shared_prompts.adapter.positions_in_sequences import take_positions
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that counts a token's rotary position from the start of its prompt.

    An answer's positions follow those of its prompt, although several answers share the prompt.
    """
    return (
        wrap(
            "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:"
            "YarnRotaryEmbedding.get_cached_cos_sin",
            take_positions,
            reason="positions of an answer continue those of its shared prompt",
        ),
    )
