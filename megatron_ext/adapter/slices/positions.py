"""Rotary positions of a slice, which begin where it does."""

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
    """``original``, which gives the positions from ``offset`` on, of the slice that runs, if one
    does. It would have ranks that share a sequence take parts from its front and its back, but for
    packed ones."""
    span = running_slice.span
    if span is not None:
        offset += span.own.begin
        if span.ranks > 1:
            length, kwargs["packed_seq"] = length // span.ranks, True
    return original(embedding, length, offset, *args, **kwargs)
