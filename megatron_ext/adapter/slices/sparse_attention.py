"""Sparse attention of a slice, whose indexer chooses among the keys of all tokens up to its end.

Indexer and attention each have keys of their own, from all slices up to the running one. Megatron
takes the places of queries for those of the first keys: it is told the slice's own. The indexer's
loss is a mean over queries, so each slice has its share of it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_ext.runtime.slices.running_slice import Span, running_slice


def knows_places() -> bool:
    """Return whether Megatron's sparse attention can be told where its queries are, as since
    0.19."""
    folder = "megatron.core.transformer.experimental_attention_variant"
    try:
        masking: Any = importlib.import_module(f"{folder}.dsa_masking")
    except ImportError:
        return False
    parameters = inspect.signature(masking.build_dsattention_forward_mask).parameters
    return "nonpacked_query_positions" in parameters


def attend_sparsely(
    original: Callable[..., Tensor],
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """DSAttention's forward for the running slice, if there is one."""
    span = running_slice.span
    if span is None:
        return original(layer, query, key, value, *args, **kwargs)
    if kwargs.get("packed_seq_params") is not None:
        raise ValueError(
            "--pipeline-slices does not go with sparse attention (dsa) over packed sequences: "
            "untried; drop --pipeline-slices"
        )
    if value is None:  # the value is a part of the key
        (key,) = running_slice.attended(layer, (key,))
    else:
        key, value = running_slice.attended(layer, (key, value))
    with _share_of_loss(layer.config, span):
        return original(layer, query, key, value, *args, **kwargs)


def index(
    original: Callable[..., tuple[Tensor, Tensor, Tensor]],
    indexer: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """DSAIndexer's forward_before_topk: queries and weights of the running slice, if there is one,
    and keys of all tokens up to its end."""
    query, key, weights = original(indexer, *args, **kwargs)
    if running_slice.span is not None:
        (key,) = running_slice.attended(indexer, (key,))
    return query, key, weights


def mask_by_places(original: Callable[..., Any], *, device: torch.device, **kwargs: Any) -> Any:
    """Replacement of build_dsattention_forward_mask for the running slice, if there is one."""
    if (span := running_slice.span) is not None:
        places = torch.arange(span.begin, span.end, device=device)
        kwargs["nonpacked_query_positions"] = places
    return original(device=device, **kwargs)


@contextlib.contextmanager
def _share_of_loss(config: Any, span: Span) -> Iterator[None]:
    """Context in which the indexer's loss weighs as much as ``span`` in its sequence. A loss per
    token is a sum already."""
    coefficient = config.dsa_indexer_loss_coeff
    if coefficient and not config.calculate_per_token_loss:
        config.dsa_indexer_loss_coeff = coefficient * (span.end - span.begin) / span.length
    try:
        yield
    finally:
        config.dsa_indexer_loss_coeff = coefficient
