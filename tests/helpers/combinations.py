"""Combinations of settings in a test: by day each pair once, at night all of them.

An effect of one setting on another shows when the two meet, whatever a third one is. So by day a
matrix of settings runs pair by pair, and from a list of cases those are omitted whose pairs all
occur in other cases. ``scripts/test.sh --nightly`` runs the full product and every case.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest  # a GPU machine's ranks import this file, where pytest may be missing

IS_NIGHT = os.environ.get("MEGATRON_EXT_NIGHTLY", "") not in ("", "0")


def at_night(*cases: Any) -> tuple[Any, ...]:
    """Return ``cases`` at night, and no case by day. Other cases, which run by day, must contain
    each setting and each pair of settings of these."""
    return cases if IS_NIGHT else ()


def nightly(why: str) -> pytest.MarkDecorator:
    """Return a mark for a test that runs at night only; ``why`` names the test that shows the same
    by day."""
    import pytest

    return pytest.mark.skipif(not IS_NIGHT, reason=f"at night (MEGATRON_EXT_NIGHTLY=1): {why}")


def in_pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return combinations in which any two values of two axes meet; at night all combinations."""
    product = list(itertools.product(*axes))
    return product if IS_NIGHT else pairwise(product)


def each_once(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return combinations in which each value occurs, with the values of shorter axes repeated; at
    night return all combinations.

    This is for axes whose interplay another test or a proof shows.
    """
    values = [list(axis) for axis in axes]
    if IS_NIGHT:
        return list(itertools.product(*values))
    longest = max(map(len, values))
    return [tuple(axis[n % len(axis)] for axis in values) for n in range(longest)]


def pairwise(product: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return combinations of ``product`` that contain every pair of values in it. The next one
    chosen is always a combination with the most pairs that no earlier one has."""
    missing = {pair for combination in product for pair in _pairs(combination)}
    chosen = []
    while missing:
        best = max(product, key=lambda combination: len(missing & _pairs(combination)))
        missing -= _pairs(best)
        chosen.append(best)
    return sorted(chosen, key=product.index)


def _pairs(combination: tuple[Any, ...]) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    """Return the pairs of values of ``combination``, each value with its axis."""
    return set(itertools.combinations(enumerate(combination), 2))
