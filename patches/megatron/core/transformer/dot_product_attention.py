"""Megatron's own attention from a slice's queries to all keys and values up to its end.

The causal mask of this attention is square, and a slice has fewer queries than keys.
"""

from __future__ import annotations

from megatron_ext.adapter.slices.slice_attention import attend_locally
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, expect, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch by which queries of a slice of a sequence attend to earlier slices' keys."""
    return (
        wrap(
            "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
            attend_locally,
            reason="a slice of a sequence attends to the slices before it",
            signature="(self, query, key, value, attention_mask, attn_mask_type=None, "
            "attention_bias=None, packed_seq_params=None)",
        ),
        expect(
            "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.forward_torch_softmax",
            reason="slices rely on this softmax to apply a given mask if its type is not causal",
            signature="(self, input, mask, softmax_offset=None)",
        ),
    )
