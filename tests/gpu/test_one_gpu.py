"""Tests of several ranks on one GPU, which NCCL refuses: the executor's gradients and peak memory.

    pytest -rP tests/gpu/test_one_gpu.py    # by itself: ranks are forked, and CUDA requires that
                                            # the process they come from has not used it

The cases on the CPU run everywhere and show that the test itself works. Those on a GPU count all
bytes that the allocator has allocated at any moment of a step, also within a pass.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron_ext.schedule.problem import P2P
from tests.gpu.small_stages import SHAPES, Seen, check, device_of, on_rank, program_of
from tests.helpers.ranks import run_ranks, values

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
]
CASES = [
    *(("cpu", spec, ranks) for spec, ranks in (("zb-h1", 2), ("zb-v", 3))),
    *(
        pytest.param("cuda", spec, ranks, marks=ON_GPU)
        for spec, ranks in (("zb-h1", 2), ("zb-h1", 4), ("zb-v", 3), ("gis", 2), ("v-half", 4))
    ),
]


@pytest.mark.parametrize("p2p", P2P)
@pytest.mark.parametrize(("device", "spec", "ranks"), CASES)
def test_gradients_are_stocks_and_the_peak_is_the_simulators(
    device: str, spec: str, ranks: int, p2p: P2P
) -> None:
    program = program_of(spec, ranks, p2p)
    run = partial(on_rank, program=program, device=device_of(device), shape=SHAPES[device])
    seen: list[Seen] = values(run_ranks(ranks, run))
    check(seen, program, device)
