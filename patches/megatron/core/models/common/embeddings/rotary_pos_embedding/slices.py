"""Rotary positions that begin at the start of the running slice.

The module's `__call__` is wrapped, which covers its subclass for Yarn too. `forward` is not,
because it caches its result by length and offset.

Not patched: MultimodalRotaryEmbedding, which gets positions as arguments.
"""

from __future__ import annotations

from megatron_ext.adapter.slices.positions import begin_at_slice
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch by which rotary positions begin at a slice's place in its sequence."""
    return (
        wrap(
            "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.__call__",
            begin_at_slice,
            reason="positions of a slice begin at the slice's first token",
        ),
    )
