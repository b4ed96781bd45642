"""Transformer Engine's attention from answers to prompts that they share."""

from __future__ import annotations

from megatron_ext.adapter.transformer_engine.installed import can_split
from megatron_ext.config import PipelineConfig
from megatron_ext.features.shared_prompts.adapter.attention_to_prompts import attend_to_prompts
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch by which answers packed in one row attend to the prompt that they share.

    There is none without Transformer Engine.
    """
    if not can_split():
        return ()
    return (
        wrap(
            "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
            attend_to_prompts,
            reason="answers attend to the prompt that they share",
        ),
    )
