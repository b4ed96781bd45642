"""Loads of unequal microbatches, drawn from length distributions like those of public data sets.

`batch` draws the microbatches of one step; numbers are relative to the mean of the distribution. No
real lengths stand behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Load:
    """Microbatches of one step. Numbers are divided by the mean of their distribution.

    Attributes:
        tokens: number of tokens of each microbatch.
        squares: for each microbatch, the sum of the squared lengths of its documents.
    """

    tokens: Floats
    squares: Floats


@dataclass(frozen=True)
class Kind:
    """Kind of load: a distribution of unequal microbatches.

    Attributes:
        draw: draws a number of microbatches, and returns their tokens and their squares (`Load`).
        attention: the share of attention in a pass of a mean microbatch.
    """

    draw: Callable[[np.random.Generator, int], tuple[Floats, Floats]]
    attention: float


def _conversations(rng: np.random.Generator, number: int, longest: int = 8192) -> Floats:
    """Return random lengths of conversations.

    They are log-normal with a median of 500 tokens and a sigma of 1, like those of UltraChat and
    Tulu.
    """
    return np.clip(rng.lognormal(np.log(500), 1.0, number), 32, longest)


def _long_documents(rng: np.random.Generator, number: int, longest: int = 131072) -> Floats:
    """Return random lengths of documents, some of them very long.

    15 % are from a tail with P(length > x) ~ 1/x between 8k and ``longest``, the rest is
    log-normal.
    """
    short = rng.lognormal(np.log(2000), 1.2, number)
    drawn = rng.random(number)
    tail = 8192 / np.maximum(1 - drawn * (1 - 8192 / longest), 1e-9)
    return np.clip(np.where(rng.random(number) < 0.15, tail, short), 64, longest)


def _single(rng: np.random.Generator, number: int) -> tuple[Floats, Floats]:
    lengths = _conversations(rng, number, 4096)
    return lengths, lengths**2


def _packs(rng: np.random.Generator, number: int) -> tuple[Floats, Floats]:
    """Return packs of at most 8,192 tokens, which are filled in order with whole conversations."""
    tokens, squares = [], []
    filled = squared = 0.0
    for length in _conversations(rng, 60 * number):
        if filled + length > 8192 and filled:
            tokens.append(filled)
            squares.append(squared)
            filled = squared = 0.0
            if len(tokens) == number:
                break
        filled += length
        squared += length * length
    return np.array(tokens[:number]), np.array(squares[:number])


def _full(
    rng: np.random.Generator,
    number: int,
    size: int,
    draw: Callable[[np.random.Generator, int], Floats],
) -> tuple[Floats, Floats]:
    """Return packs of exactly ``size`` tokens. The last document of each pack is cut."""
    squares = []
    for _ in range(number):
        left, squared = float(size), 0.0
        while left > 0:
            length = min(float(draw(rng, 1)[0]), left)
            squared += length * length
            left -= length
        squares.append(squared)
    return np.full(number, float(size)), np.array(squares)


KINDS = {
    "sft-single": Kind(_single, 0.04),
    "sft-packs": Kind(_packs, 0.05),
    "full-8k": Kind(partial(_full, size=8192, draw=_conversations), 0.05),
    "long-128k": Kind(partial(_full, size=131072, draw=_long_documents), 0.40),
}


@cache
def _means(name: str) -> tuple[float, float]:
    rng = np.random.default_rng(99)
    drawn = [KINDS[name].draw(rng, 64) for _ in range(40)]
    tokens, squares = (np.concatenate(part).mean() for part in zip(*drawn, strict=True))
    return float(tokens), float(squares)


def batch(name: str, number: int, seed: int) -> Load:
    """Return ``number`` microbatches of the kind ``name``. Each ``seed`` gives another step."""
    tokens, squares = KINDS[name].draw(np.random.default_rng(1000 + seed), number)
    mean_tokens, mean_squares = _means(name)
    return Load(tokens / mean_tokens, squares / mean_squares)
