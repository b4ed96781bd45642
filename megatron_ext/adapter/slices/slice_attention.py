"""Attention of a slice's queries to the keys and values of all tokens up to the slice's end.

A causal mask must then be aligned to the bottom right: the last query sees all keys. Alignment to
the top left would be silently wrong. In packs each document has such a mask of its own, which only
Transformer Engine's attention knows.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_ext.adapter.slices.packs import attended_part
from megatron_ext.runtime.slices.running_slice import running_slice


class MaskOfPacks(enum.Enum):
    """Mask of Transformer Engine that Megatron's AttnMaskType lacks, for packed queries and keys.

    Megatron passes the mask's name on to Transformer Engine.
    """

    padding_causal_bottom_right = enum.auto()


def attend_locally(
    original: Callable[..., Tensor],
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Run DotProductAttention's forward for the running slice of a sequence, if there is one.

    The slice's queries attend to the keys of all tokens up to its end. ``attention_mask``, if
    given, is the slice's: [.., queries, keys up to its end].
    """
    span = running_slice.span
    if span is None:
        return original(layer, query, key, value, attention_mask, *args, **kwargs)
    softmax = layer.scale_mask_softmax
    _refuse_other_masks(softmax.attn_mask_type)
    key, value = running_slice.attended(layer, (key, value))
    if span.local.begin == 0:
        return original(layer, query, key, value, attention_mask, *args, **kwargs)
    if attention_mask is None:
        attention_mask = bottom_right_mask(query.size(0), key.size(0), query.device)
    with _by_given_mask(softmax):
        return original(layer, query, key, value, attention_mask, *args, **kwargs)


def attend_with_transformer_engine(
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
    """Run TEDotProductAttention's forward for the running slice of a sequence, if there is one.

    The slice's queries attend to the keys of all tokens up to its end.
    """
    span = running_slice.span
    begin = 0
    kind: enum.Enum = attn_mask_type
    if span is not None:
        _refuse_other_masks(attn_mask_type)
        bottom_right: enum.Enum = AttnMaskType.causal_bottom_right
        if packed_seq_params is not None:
            part = attended_part(span)
            begin, packed_seq_params = part.begin, part.params
            bottom_right = MaskOfPacks.padding_causal_bottom_right
        key, value = running_slice.attended(layer, (key, value), begin)
        if span.local.begin > begin:
            kind = bottom_right
    shared = span is not None and span.ranks > 1
    with _without_context_parallelism(layer) if shared else contextlib.nullcontext():
        return original(
            layer,
            query,
            key,
            value,
            attention_mask,
            kind,
            attention_bias,
            packed_seq_params,
            **kwargs,
        )


@lru_cache(maxsize=64)
def bottom_right_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the causal mask for ``keys`` tokens, of which only the last ``queries`` are queries.

    It is a bool tensor [1, 1, queries, keys]. True hides a key from a query.
    """
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return visible.logical_not()[None, None]


@contextlib.contextmanager
def _by_given_mask(softmax: Any) -> Iterator[None]:
    """Context in which ``softmax`` applies the mask that it is given, not its own square one."""
    kind = softmax.attn_mask_type
    softmax.attn_mask_type = AttnMaskType.arbitrary
    try:
        yield
    finally:
        softmax.attn_mask_type = kind


@contextlib.contextmanager
def _without_context_parallelism(layer: Any) -> Iterator[None]:
    """Context in which Transformer Engine's ``layer`` runs without context parallelism.

    The keys and values already include those of all ranks that share the sequence.
    """
    group = layer.cp_group
    layer.cp_group = None
    try:
        yield
    finally:
        layer.cp_group = group


def _refuse_other_masks(kind: AttnMaskType) -> None:
    if kind is not AttnMaskType.causal:
        raise ValueError(
            f"--pipeline-slices needs causal attention, and a layer's mask is {kind.name}, under "
            "which tokens of an early slice would see tokens of later slices; drop "
            "--pipeline-slices"
        )
