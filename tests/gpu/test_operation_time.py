"""Tests that measure the seconds of single operations, from which the factors of a machine are
computed. They have not run on a GPU yet.

pytest tests/gpu/test_operation_time.py     # on one GPU
"""

from __future__ import annotations

import pytest

from megatron_ext.runtime.measure.operation_time import (
    attention_seconds,
    grouped_seconds,
    machine_versions,
    product_seconds,
)
from tests.gpu.runs import GPUS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]


def test_a_product_of_four_times_the_operations_takes_longer() -> None:
    small, large = (product_seconds((4096, size, 4096), in_fp8=False) for size in (4096, 16384))
    assert small is not None and large is not None
    assert 0 < 2 * small < large
    assert all(" " in version for version in machine_versions())


def test_four_times_as_many_experts_take_longer() -> None:
    small, large = (grouped_seconds((1024, 2048, 4096, experts)) for experts in (4, 16))
    assert small is not None and large is not None
    assert 0 < 2 * small < large


def test_attention_of_a_longer_sample_takes_longer() -> None:
    """Attention of a longer sample takes longer, also if heads share keys and values. The backward
    pass takes longer than the forward pass."""
    small, large = (attention_seconds((1, tokens, 32, 8, 128)) for tokens in (4096, 8192))
    assert small is not None and large is not None
    assert 0 < 2 * small[0] < large[0] and 0 < 2 * small[1] < large[1]
    assert small[0] < small[1]
