"""Tests of the transport over NCCL: small stages, one rank on each GPU, without Megatron.

    pytest -rP tests/gpu/test_nccl.py       # on a node with two GPUs or more

If the order of messages is wrong, a run hangs until NCCL's timeout ends it. The case on the CPU,
over gloo, runs everywhere and shows that the test itself works. The cases on GPUs have not run yet.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from megatron_ext.schedule.problem import P2P
from tests.gpu.runs import RANKS, needs_two_gpus, torchrun
from tests.gpu.small_stages import Seen, check, program_of
from tests.helpers.combinations import at_night

CASES = [
    # This case rehearses the cases on GPUs, on the CPU and at night. By day test_one_gpu_cases runs
    # such a rehearsal, and test_memory checks the same peaks.
    *at_night(("cpu", "zb-v", P2P.ASYNC)),
    *(
        pytest.param("cuda", spec, p2p, marks=[pytest.mark.gpu, needs_two_gpus])
        for spec in ("1f1b", "zb-h1", "zb-v", "v-half", "interleaved", "gis", "hanayo")
        for p2p in P2P
    ),
]


@pytest.mark.parametrize(("device", "spec", "p2p"), CASES)
def test_gradients_are_stocks_and_the_peak_is_the_simulators(
    device: str, spec: str, p2p: P2P, tmp_path: Path
) -> None:
    torchrun(RANKS, "-m", "tests.gpu.nccl_rank", spec, p2p, device, str(tmp_path))
    seen: list[Seen] = [pickle.loads((tmp_path / str(r)).read_bytes()) for r in range(RANKS)]
    check(seen, program_of(spec, RANKS, p2p), device)
