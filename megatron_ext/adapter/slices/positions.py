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
    does."""
    if running_slice.span is not None:
        offset += running_slice.span.begin
    return original(embedding, length, offset, *args, **kwargs)
