"""Seconds of single operations, for the factors of a machine. They have run on no GPU yet.

pytest tests/gpu            # a rank's row on one GPU, trainings on two or more
"""

from __future__ import annotations

import pytest

from megatron_ext.runtime.measure.operation_time import machine_versions, product_seconds
from tests.gpu.runs import GPUS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]


def test_a_product_of_four_times_the_operations_takes_longer() -> None:
    small, large = (product_seconds((4096, size, 4096), in_fp8=False) for size in (4096, 16384))
    assert small is not None and large is not None
    assert 0 < 2 * small < large
    assert all(" " in version for version in machine_versions())
