"""Core attention of a row in which answers share their prompts.

Each segment has a causal mask of its own that is aligned to the bottom right: the last token of an
answer sees all of the prefix and of the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_ext.adapter.slices.slice_attention import MaskOfPacks
from megatron_ext.features.shared_prompts.adapter.params import SharedPromptParams
from megatron_ext.features.shared_prompts.runtime.attended import attend


def attend_to_prompts(
    original: Callable[..., Tensor],
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attn_mask_type: AttnMaskType,
    attention_bias: Tensor | None = None,
    packed_seq_params: PackedSeqParams | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run TEDotProductAttention's forward, with attention of answers to prompts they share."""
    given = attention_mask, attn_mask_type, attention_bias, packed_seq_params
    if not isinstance(packed_seq_params, SharedPromptParams):
        return original(layer, query, key, value, *given, **kwargs)
    shared = packed_seq_params.shared
    assert shared is not None
    if attn_mask_type is not AttnMaskType.causal:
        raise ValueError(
            "--pipeline-shared-prompts needs causal attention, and the mask of a layer is "
            f"{attn_mask_type.name}: pack sequences without sharing prompts, or drop "
            "--pipeline-shared-prompts"
        )

    def kernel(keys: Tensor, values: Tensor) -> Tensor:
        mask = MaskOfPacks.padding_causal_bottom_right
        return original(
            layer, query, keys, values, None, mask, attention_bias, shared.params, **kwargs
        )

    return attend(shared.attended, kernel, key, value)
