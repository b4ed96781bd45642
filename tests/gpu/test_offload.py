"""Tests of activation offload on one GPU: results, the allocator's peak, and the copies.

    pytest -rP tests/gpu/test_offload.py    # by itself, as test_one_gpu.py

The cases on the CPU run everywhere and show that the test itself works.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_ext.schedule.problem import Offload
from tests.gpu.offloading import Copies, measure_copies, step
from tests.gpu.small_stages import TOLERANCE
from tests.gpu.test_one_gpu import ON_GPU
from tests.helpers.ranks import run_ranks, values

CASES = [
    *(("cpu", spec, ranks) for spec, ranks in (("1f1b", 4), ("gis", 2), ("zb-v", 3))),
    *(
        pytest.param("cuda", spec, ranks, marks=ON_GPU)
        for spec, ranks in (("1f1b", 4), ("gis", 2), ("gis-h", 4), ("zb-v", 3), ("v-half", 4))
    ),
]


@pytest.mark.parametrize(("device", "spec", "ranks"), CASES)
def test_gradients_are_stocks_and_the_peak_falls(device: str, spec: str, ranks: int) -> None:
    without, with_offload = (step(spec, ranks, device, way) for way in (Offload.NONE, Offload.FULL))
    for way, result in (("without", without), ("with offload", with_offload)):
        assert all(rank.gradients_are_stocks for rank in result.seen)
        assert any(rank.left for rank in result.seen) == (result is with_offload)
        print(f"{spec}, {ranks} ranks, {device}, {way}: {result.peaks} of {result.expected}")
        # The inputs of the first stage are not offloaded: no operation saves them, but here they
        # have gradients.
        error = TOLERANCE * max(without.peaks)
        assert result.peaks == pytest.approx(result.expected, abs=error)
    assert max(with_offload.peaks) < 0.9 * max(without.peaks)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
class TestCopies:
    """Tests of copies in a process of their own, as CUDA must not be used before ranks are
    forked."""

    def test_copies_are_quick_and_run_during_passes(self) -> None:
        copies: Copies
        (copies,) = values(run_ranks(1, partial(measure_copies, kind="cuda")))
        print(copies)
        slower = min(copies.to_host, copies.from_host)
        assert slower > 5
        assert copies.both > 1.2 * slower
        assert copies.with_compute < 1.25 * copies.compute
