"""Rotary positions of a row in which answers share their prompts: a token's place in its sequence.

Megatron reads from the row's parameters the length up to which frequencies are computed, and passes
it to the embedding. Here this length is an int with the positions as an attribute. As an argument
it belongs to its row, also when passes are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_ext.features.shared_prompts.adapter.params import SharedPromptParams


class _LengthOfRow(int):
    """Length of a row's longest sequence, with the positions of its tokens as an attribute."""

    plain: int
    positions: Tensor


def carry_positions(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Return the length for rotary frequencies, as RotaryEmbedding's ``original`` computes it.

    For a row in which answers share prompts, the positions of the row's tokens are an attribute of
    the length.
    """
    length = original(*args, **kwargs)
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, SharedPromptParams) and argument.shared is not None:
            plain, length = length, _LengthOfRow(length)
            length.plain, length.positions = plain, argument.shared.positions
    return length


def take_positions(
    original: Callable[..., Any], embedding: Any, length: int, *args: Any, **kwargs: Any
) -> Any:
    """Return the rotary frequencies that ``original`` computes.

    For a row with shared prompts there is one for each token of the row, whose positions are an
    attribute of ``length``.
    """
    if not isinstance(length, _LengthOfRow):
        return original(embedding, length, *args, **kwargs)
    return _rows(original(embedding, length.plain, *args, **kwargs), length.positions)


def _rows(made: Any, positions: Tensor) -> Any:
    if isinstance(made, tuple):
        return tuple(_rows(part, positions) for part in made)
    return made[positions] if isinstance(made, Tensor) else made
