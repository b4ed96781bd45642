"""Attention of a slice's queries to the keys and values of all tokens up to the slice's end.

A causal mask must then be aligned to the bottom right: the last query sees all keys. Alignment to
the top left would be silently wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_ext.runtime.slices.running_slice import running_slice


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
    """DotProductAttention's forward for the running slice, if there is one.

    ``attention_mask``, if given, is the slice's, [.., queries, keys up to its end].
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
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """TEDotProductAttention's forward for the running slice, if there is one."""
    span = running_slice.span
    if span is None:
        return original(layer, query, key, value, attention_mask, attn_mask_type, *args, **kwargs)
    _refuse_other_masks(attn_mask_type)
    key, value = running_slice.attended(layer, (key, value))
    if span.local.begin > 0:
        attn_mask_type = AttnMaskType.causal_bottom_right
    with _without_context_parallelism(layer) if span.ranks > 1 else contextlib.nullcontext():
        return original(layer, query, key, value, attention_mask, attn_mask_type, *args, **kwargs)


@lru_cache(maxsize=64)
def bottom_right_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a mask of the keys hidden from the last ``queries`` tokens: bool [1, 1, queries,
    keys]."""
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return visible.logical_not()[None, None]


@contextlib.contextmanager
def _by_given_mask(softmax: Any) -> Iterator[None]:
    """Context in which ``softmax`` applies the mask it is given: its own causal mask is square."""
    kind = softmax.attn_mask_type
    softmax.attn_mask_type = AttnMaskType.arbitrary
    try:
        yield
    finally:
        softmax.attn_mask_type = kind


@contextlib.contextmanager
def _without_context_parallelism(layer: Any) -> Iterator[None]:
    """Context in which Transformer Engine's ``layer`` uses keys and values as they are: they
    already include those of all ranks that share the sequence."""
    group = layer.cp_group
    layer.cp_group = None
    try:
        yield
    finally:
        layer.cp_group = group


def _refuse_other_masks(kind: AttnMaskType) -> None:
    if kind is not AttnMaskType.causal:
        raise ValueError(
            f"--pipeline-slices needs causal attention, and this layer's mask is {kind.name}: a "
            f"token of an early slice would see tokens of later slices; drop --pipeline-slices"
        )
