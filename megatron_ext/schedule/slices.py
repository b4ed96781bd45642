"""Slices of microbatches along their sequence.

A slice attends to those before it (Seq1F1B, TeraPipe, SlimPipe): on a stage the forward passes of a
microbatch's slices come in order, the backward passes in reverse. Bubbles, and the memory that is
held of each microbatch, shrink by about the number of slices.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron_ext.schedule.action import even_ends


class Lengths(enum.StrEnum):
    """Rules for the lengths of the slices into which the sequence of a microbatch is cut."""

    EVEN = "even"  # all slices have the same number of tokens
    # All slices take equal work: later slices attend to more tokens, and are shorter.
    BALANCED = "balanced"


def parse_lengths(text: str, name: str = "slice lengths") -> Lengths | tuple[int, ...]:
    """Return the lengths of a sequence's slices named by ``text``: a rule, or tokens of each.

    The rules are ``even`` and ``balanced``; tokens are written like ``4096,2048,1024,1024``.

    Args:
        name: name of the setting in errors.

    Raises:
        ValueError: ``text`` is none of these.
    """
    if text in list(Lengths):
        return Lengths(text)
    tokens = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in tokens):
        raise ValueError(
            f"{name} {text}: write even, balanced (equal work) or the tokens of each "
            f"slice, as in 4096,2048,1024,1024"
        )
    return tuple(map(int, tokens))


@dataclass(frozen=True)
class Slices:
    """Number and lengths of the slices into which each microbatch is cut along its sequence.

    Attributes:
        count: number of slices; 1: microbatches are not cut.
        lengths: a rule, or the tokens of each slice.
        joined_weights: whether the W (weight gradient) passes of a microbatch's slices follow each
            other, after the I (input gradient) of the microbatch's first slice, which comes last,
            and compute each weight's gradient once.
    """

    count: int = 1
    lengths: Lengths | tuple[int, ...] = Lengths.EVEN
    joined_weights: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the number of slices is {self.count}; write 1 or more")
        if isinstance(self.lengths, tuple) and len(self.lengths) != self.count:
            raise ValueError(
                f"{len(self.lengths)} slice lengths are given for {self.count} slices: give one "
                "length for each slice, or write even or balanced"
            )
        if self.count == 1 and self.lengths is not Lengths.EVEN:
            raise ValueError(
                f"slice lengths {self} are given without a number of slices: give the number of "
                "slices, too"
            )
        if self.count == 1 and self.joined_weights:
            raise ValueError(
                "weight gradients of slices are to be joined, but no number of slices is given: "
                "give the number of slices, too"
            )

    def __str__(self) -> str:
        """Return the lengths of the slices as text for `parse_lengths`."""
        if isinstance(self.lengths, tuple):
            return ",".join(map(str, self.lengths))
        return str(self.lengths)

    def ends(self, attention: float) -> tuple[float, ...]:
        """Return the end of each slice of a sequence, as a share of the sequence from 0 to 1.

        Args:
            attention: the share of a pass's time that grows with the square of the sequence.
        """
        if isinstance(self.lengths, tuple):
            return tuple(end / sum(self.lengths) for end in accumulate(self.lengths))
        shares = even_ends(self.count)
        if self.lengths is Lengths.BALANCED and attention:
            # With attention's share a, the first share x of a sequence takes the share (1 - a) x +
            # a x^2 of its time.
            linear = 1 - attention
            return tuple(
                2 * share / (linear + math.sqrt(linear**2 + 4 * attention * share))
                for share in shares
            )
        return shares


UNCUT = Slices()


def lengths_of(ends: Sequence[float], tokens: int, multiple_of: int = 1) -> tuple[int, ...]:
    """Return the lengths, in tokens, of the slices of a sequence of ``tokens``.

    ``ends`` are the slices' ends as shares of the sequence, which are met as nearly as possible.
    The lengths are multiples of ``multiple_of``, and none is 0.

    Raises:
        ValueError: ``tokens`` is not such a multiple, or too small.
    """
    units, rest = divmod(tokens, multiple_of)
    if rest or units < len(ends):
        raise ValueError(
            f"a sequence of {tokens} tokens cannot be cut into {len(ends)} slices whose lengths "
            f"are multiples of {multiple_of} tokens: take fewer slices"
        )
    cuts = [round(end * units) for end in ends]
    # Every slice, also the last one, gets at least ``multiple_of`` tokens.
    for number in range(len(cuts)):
        least = cuts[number - 1] + 1 if number else 1
        cuts[number] = min(max(cuts[number], least), units - (len(cuts) - 1 - number))
    return tuple((end - begin) * multiple_of for begin, end in pairwise([0, *cuts]))
