"""Rotary positions of a slice, which begin at the slice's start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.runtime.slices.running_slice import running_slice


def begin_at_slice(
    original: Callable[..., Any],
    embedding: Any,
    length: int,
    offset: int = 0,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``original``, which returns the positions from ``offset`` on, for the running slice, if
    there is one. The call is marked as packed for context-parallel ranks: they would take a part
    from the front and one from the back otherwise."""
    span = running_slice.span
    if span is not None:
        offset += span.local.begin
        if span.ranks > 1:
            length, kwargs["packed_seq"] = length // span.ranks, True
    return original(embedding, length, offset, *args, **kwargs)
