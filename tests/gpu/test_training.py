"""Training over NCCL: what only several GPUs can show. Written without one, and not run yet.

    pytest tests/gpu            # on a node with two GPUs or more

Stock and ours run in processes of their own, started by torchrun as a user starts them.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.megatron_runs import SCRIPT, model_flags

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs for a pipeline, here are {GPUS}"),
]


@functools.cache
def losses(schedule: str | None, p2p: str | None = None) -> tuple[str, ...]:
    """The losses that a run prints, digit for digit."""
    ranks = 4 if GPUS >= 4 else 2
    flags = model_flags(
        num_layers=8,
        pipeline_model_parallel_size=ranks,
        pipeline_schedule=schedule,
        pipeline_p2p=p2p,
        transformer_impl="local",
        no_masked_softmax_fusion=True,
        no_gradient_accumulation_fusion=True,
        no_persist_layer_norm=True,
        train_iters=5,
    )
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "-m", "megatron_ext", str(SCRIPT), *flags),
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = tuple(re.findall(r"lm loss: (\S+)", ended.stdout))
    assert len(found) == 5, ended.stdout[-3000:]
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-auto"])
def test_losses_are_stocks(schedule: str) -> None:
    """With one stage a rank a run from scratch starts from stock's weights."""
    assert losses(schedule) == losses(None)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved", "gis", "v-half"])
def test_one_communicator_gives_the_losses_of_many(schedule: str) -> None:
    """NCCL runs its batches in order, and CUDA_DEVICE_MAX_CONNECTIONS=1 holds up passes behind a
    batch that waits: should the order of messages be wrong, this hangs."""
    assert losses(schedule, "batched") == losses(schedule)


@pytest.mark.parametrize("schedule", ["zb-v", "v-half", "interleaved", "gis"])
def test_it_trains(schedule: str) -> None:
    """Several stages a rank start from other weights; the run must end, and learn."""
    found = [float(loss) for loss in losses(schedule)]
    assert found[-1] < found[0]
