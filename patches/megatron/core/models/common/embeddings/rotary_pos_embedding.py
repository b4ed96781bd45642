"""Rotary positions begin where the slice of a sequence does that a pass is about.

The call of the module is wrapped, of Yarn's too, which is one: its `forward` keeps what it has
made by length and offset.

Not patched: MultimodalRotaryEmbedding, which is given positions.
"""

from __future__ import annotations

from megatron_ext.adapter.slices.positions import begin_at_slice
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch that moves positions on."""
    return (
        wrap(
            "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.__call__",
            begin_at_slice,
            reason="the positions of a slice begin where it does",
        ),
    )
