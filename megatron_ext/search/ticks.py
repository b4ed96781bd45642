"""Costs in whole ticks, the same on every machine: a search on integers has no rounding
differences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

TICKS = 100_000  # number of ticks in ``total`` if the times have no common unit


def common_tick(figures: Iterable[float], total: float) -> float:
    """Return the largest unit of which all ``figures`` (durations) are multiples, as a tick.

    Return ``total`` / `TICKS` if there is none, or if the unit is so small that ``total`` has more
    than ten times as many ticks.
    """
    distinct = {figure for figure in figures if figure}
    fractions = [Fraction(figure).limit_denominator(1000) for figure in distinct]
    smallest = total / TICKS
    if not all(fractions):
        return smallest
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    unit = Fraction(math.gcd(*(int(f * denominator) for f in fractions)), denominator)
    if 10 * unit < smallest:
        return smallest
    tick = float(unit)
    exact = all(abs(figure - round(figure / tick) * tick) <= 1e-9 * tick for figure in distinct)
    return tick if exact else smallest
