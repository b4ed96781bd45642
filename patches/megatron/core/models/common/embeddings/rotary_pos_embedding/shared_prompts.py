"""Rotary positions of a row in which answers share their prompts.

Not patched: MultimodalRotaryEmbedding, which gets positions as arguments.
"""

from __future__ import annotations

from megatron_ext.config import PipelineConfig
from megatron_ext.features.shared_prompts.adapter.positions_in_sequences import (
    carry_positions,
    take_positions,
)
from megatron_ext.patches.engine import Patch, wrap

_EMBEDDING = "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding"
_REASON = "an answer's positions go on behind those of its prompt"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that count a token's rotary position from the start of its prompt.

    An answer's positions follow those of its prompt, although several answers share the prompt.
    """
    return (
        wrap(f"{_EMBEDDING}.get_rotary_seq_len", carry_positions, reason=_REASON),
        wrap(f"{_EMBEDDING}.__call__", take_positions, reason=_REASON),
    )
