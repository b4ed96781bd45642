"""Sparse attention of a slice, whose indexer chooses among the keys of all tokens up to its end.

Indexer and attention each have keys of their own, from all slices up to the running one. By default
Megatron assumes that the first query is at the first key's position, so the slice's positions are
passed to it. The indexer's loss is a mean over queries, so the loss of each slice is weighted by
the slice's share of the sequence.
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
    """Return whether Megatron's sparse attention accepts positions of queries (since 0.19)."""
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
    """Run DSAttention's forward for the running slice of a sequence, if there is one.

    The slice's queries attend to chosen keys of all tokens up to its end.
    """
    span = running_slice.span
    if span is None:
        return original(layer, query, key, value, *args, **kwargs)
    if kwargs.get("packed_seq_params") is not None:
        raise ValueError(
            "--pipeline-slices does not go with sparse attention (dsa) over packed sequences: "
            "this combination is untested; drop --pipeline-slices"
        )
    if value is None:  # latent attention has no value tensor: the value is a part of the key
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
    """Return queries, keys and weights of the sparse attention's indexer before it chooses keys.

    For the running slice of a sequence, if there is one, the keys are those of all tokens up to its
    end.
    """
    query, key, weights = original(indexer, *args, **kwargs)
    if running_slice.span is not None:
        (key,) = running_slice.attended(indexer, (key,))
    return query, key, weights


def mask_by_places(original: Callable[..., Any], *, device: torch.device, **kwargs: Any) -> Any:
    """Return the mask of sparse attention, with the running slice's positions, if there is one.

    Wraps Megatron's build_dsattention_forward_mask.
    """
    if (span := running_slice.span) is not None:
        places = torch.arange(span.begin, span.end, device=device)
        kwargs["nonpacked_query_positions"] = places
    return original(device=device, **kwargs)


@contextlib.contextmanager
def _share_of_loss(config: Any, span: Span) -> Iterator[None]:
    """Context in which the sparse attention indexer's loss is weighted by the share of a slice.

    The weight is the slice's share of its sequence. A loss that is summed over tokens needs none.
    """
    coefficient = config.dsa_indexer_loss_coeff
    if coefficient and not config.calculate_per_token_loss:
        config.dsa_indexer_loss_coeff = coefficient * (span.end - span.begin) / span.length
    try:
        yield
    finally:
        config.dsa_indexer_loss_coeff = coefficient
