"""Distance of two tensors, in units in the last place (ulps).

One ulp is the step to the next number of the type. Between zeros of either sign there are 0 ulps,
though their bits differ; the distance of integers is their difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_ext.recordings.piece import STORED_AS

Bits = np.ndarray  # array of the signed integers in `STORED_AS`
_BLOCK = 1 << 22  # number of elements that are compared at a time
_INFINITY = {
    "float64": 0x7FF0 << 48,
    "float32": 0x7F80 << 16,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
}


@dataclass(frozen=True)
class Difference:
    """Difference of two tensors of one type and shape.

    Attributes:
        elements: number of elements.
        differ: number of elements whose bits differ.
        ulps: largest distance in units in the last place, over elements that are numbers in both.
        nans: number of elements that are a number in only one tensor.
        relative: norm of the difference, as a share of the first tensor's norm; NaN if elements
            that are not finite differ.
        norm: norm of the first tensor.
        crosses_zero: whether some element has different signs in the two tensors. Its distance in
            ulps counts all numbers around zero, and says nothing.
    """

    elements: int
    differ: int = 0
    ulps: int = 0
    nans: int = 0
    relative: float = 0.0
    norm: float = 0.0
    crosses_zero: bool = False

    def __bool__(self) -> bool:
        return self.differ > 0


def bits_difference(a: Bits, b: Bits, dtype: str) -> Difference:
    """Return the difference of two tensors, given as the bits of their elements.

    Args:
        a, b: bits of the elements, as integers.
        dtype: torch's name of the type of the elements.
    """
    assert a.shape == b.shape and a.dtype == b.dtype == np.dtype(STORED_AS[dtype])
    a, b = a.reshape(-1), b.reshape(-1)
    differ = ulps = nans = 0
    crosses_zero = False
    distance = norm = 0.0
    for start in range(0, a.size, _BLOCK):
        one, other = a[start : start + _BLOCK], b[start : start + _BLOCK]
        values = as_numbers(one, dtype)
        norm += float(np.sum(values * values))
        where = np.flatnonzero(one != other)
        if not where.size:
            continue
        one, other = one[where], other[where]
        differ += int(where.size)
        strange = _is_nan(one, dtype), _is_nan(other, dtype)
        nans += int(np.count_nonzero(strange[0] ^ strange[1]))
        numbers = ~(strange[0] | strange[1])
        ulps = max(ulps, _largest_distance(one[numbers], other[numbers], dtype))
        with np.errstate(invalid="ignore", over="ignore"):
            numbers_of_other = as_numbers(other, dtype)
            difference = values[where] - numbers_of_other
            distance += float(np.sum(difference * difference))
            crosses_zero |= bool(np.any(values[where] * numbers_of_other < 0))
    share = _share(distance, norm)
    return Difference(a.size, differ, ulps, nans, share, math.sqrt(norm), crosses_zero)


def _share(distance: float, norm: float) -> float:
    if distance == 0:
        return 0.0
    return math.sqrt(distance / norm) if norm else math.inf


def as_numbers(bits: Bits, dtype: str) -> np.ndarray:
    """Return the numbers that ``bits`` stand for, in double precision."""
    if dtype == "bfloat16":
        wide = bits.view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    if dtype.startswith("float8"):
        # The distance in ulps is exact enough to tell which of two differences is larger.
        return _ordered(bits, dtype).astype(np.float64)
    real = {"bool": "uint8"}.get(dtype, dtype)
    return bits.view(np.dtype(real)).astype(np.float64)


def _largest_distance(a: Bits, b: Bits, dtype: str) -> int:
    if not a.size:
        return 0
    a, b = _ordered(a, dtype), _ordered(b, dtype)
    low, high = np.minimum(a, b), np.maximum(a, b)
    return int(np.max(high.view(np.uint64) - low.view(np.uint64)))


def _ordered(bits: Bits, dtype: str) -> np.ndarray:
    """Return integers of 64 bits in the order of the numbers that ``bits`` stand for.

    Neighbouring numbers become neighbouring integers.
    """
    if dtype in ("uint8", "bool"):
        bits = bits.view(np.uint8)
    wide = bits.astype(np.int64)
    if not dtype.startswith(("float", "bfloat")):
        return wide
    smallest = np.int64(np.iinfo(bits.dtype).min)
    return np.where(wide < 0, smallest - wide, wide)


def _is_nan(bits: Bits, dtype: str) -> np.ndarray:
    if dtype not in _INFINITY:
        return np.zeros(bits.shape, bool)
    return np.abs(_ordered(bits, dtype)) > _INFINITY[dtype]
