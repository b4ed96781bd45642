"""Transformer Engine's attention from a slice's queries to all keys and values up to its end.

With fewer queries than keys its plain causal mask is silently aligned to the top left.
"""

from __future__ import annotations

from megatron_ext.adapter.slices.slice_attention import attend_with_transformer_engine
from megatron_ext.adapter.transformer_engine.installed import can_split
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch by which queries of a slice of a sequence attend to keys of earlier slices.

    There is none without Transformer Engine.
    """
    if not can_split():
        return ()
    return (
        wrap(
            "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
            attend_with_transformer_engine,
            reason="a slice of a sequence attends to the slices before it",
        ),
    )
