"""Rotary positions of a slice.

Megatron's embedding counts positions from 0, as every microbatch begins there. A slice begins in
the middle: its positions go on from the tokens before it, and in a pack begin anew with each
document.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_ext.adapter.slices.packs import longest_document, places_in_documents
from megatron_ext.runtime.slices.running_slice import Span, running_slice


def begin_at_slice(
    original: Callable[..., Any],
    embedding: Any,
    length: int,
    offset: int = 0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return rotary positions computed by ``original``, from the running slice's first token on.

    Without a running slice of a sequence nothing changes. For context-parallel ranks the call is
    marked as packed: each rank would otherwise take a part from the sequence's front and one from
    its back.
    """
    span = running_slice.span
    if span is not None and kwargs.get("packed_seq"):
        length = max(length, longest_document())
        return _in_documents(original(embedding, length, offset, *args, **kwargs), span)
    if span is not None:
        offset += span.local.begin
        if span.ranks > 1:
            length, kwargs["packed_seq"] = length // span.ranks, True
    return original(embedding, length, offset, *args, **kwargs)


def _in_documents(made: Any, span: Span) -> Any:
    """Return the rows of ``made`` for the slice's tokens, by their places in their documents.

    ``made`` is a tensor with a row for each position, or a tuple with some such tensors.
    """
    if isinstance(made, tuple):
        return tuple(_in_documents(part, span) for part in made)
    return made[places_in_documents(span)] if isinstance(made, Tensor) else made
