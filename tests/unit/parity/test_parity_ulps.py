"""Tests of the distance between tensors in units in the last place (ulps)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_ext.recordings.ulps import as_numbers, bits_difference


def bits(values: list[float], dtype: str) -> np.ndarray:
    tensor = torch.tensor(values, dtype=getattr(torch, dtype))
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()]).numpy()


def following(value: float, steps: int, dtype: str) -> float:
    """Return the number that is ``steps`` representable numbers farther from zero than
    ``value``."""
    up = bits([value], dtype) + np.array(steps, bits([value], dtype).dtype)
    return float(as_numbers(up, dtype)[0])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [1.0, -1.0, 3.140625, -0.015625])
def test_steps_to_the_next_numbers(dtype: str, value: float) -> None:
    there = following(value, 3, dtype)
    assert there != value
    found = bits_difference(bits([value, 2.0], dtype), bits([there, 2.0], dtype), dtype)
    assert (found.elements, found.differ, found.ulps, found.nans) == (2, 1, 3, 0)
    assert found.relative == pytest.approx(abs(there - value) / math.hypot(value, 2.0))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_across_zero(dtype: str) -> None:
    """Distances in ulps are right across zero: +0 and -0 are 0 steps apart, and the smallest
    numbers of the two signs are 2 steps apart."""
    zeros = bits_difference(bits([0.0], dtype), bits([-0.0], dtype), dtype)
    assert (zeros.differ, zeros.ulps) == (1, 0)
    smallest = following(0.0, 1, dtype)
    around = bits_difference(bits([smallest], dtype), bits([-smallest], dtype), dtype)
    assert (around.differ, around.ulps) == (1, 2)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_the_ends_of_a_type(dtype: str) -> None:
    info = torch.finfo(getattr(torch, dtype))
    found = bits_difference(bits([-math.inf], dtype), bits([math.inf], dtype), dtype)
    assert found.ulps == 2 * (
        bits_difference(bits([0.0], dtype), bits([info.max], dtype), dtype).ulps + 1
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_nan(dtype: str) -> None:
    nan = math.nan
    found = bits_difference(bits([nan, nan, 1.0], dtype), bits([nan, 1.0, 1.0], dtype), dtype)
    assert (found.differ, found.nans, found.ulps) == (1, 1, 0)
    assert math.isnan(found.relative), "it is more than any floor"
    assert not bits_difference(bits([nan, 1.0], dtype), bits([nan, 1.0], dtype), dtype)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "apart"),
    [("int64", 5, -2, 7), ("int32", -7, 7, 14), ("uint8", 250, 3, 247), ("bool", 0, 1, 1)],
)
def test_integers_are_apart_by_their_difference(dtype: str, a: int, b: int, apart: int) -> None:
    found = bits_difference(bits([a], dtype), bits([b], dtype), dtype)
    assert (found.differ, found.ulps) == (1, apart)


def test_8_bit_floats_can_be_compared() -> None:
    a, b = bits([1.0, 2.0], "float8_e4m3fn"), bits([1.125, 2.0], "float8_e4m3fn")
    found = bits_difference(a, b, "float8_e4m3fn")
    assert (found.differ, found.ulps) == (1, 1)


def test_nothing_is_lost_between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_ext.recordings.ulps._BLOCK", 4)
    a = np.arange(11, dtype=np.float32)
    b = a.copy()
    b[[0, 3, 4, 10]] += 1
    found = bits_difference(a.view("i4"), b.view("i4"), "float32")
    assert (found.elements, found.differ) == (11, 4)
    assert found.relative == pytest.approx(2 / np.linalg.norm(a))
