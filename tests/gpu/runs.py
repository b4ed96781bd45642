"""Runs on a node with GPUs: processes of their own, started by torchrun as a user starts them."""

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

needs_two_gpus = pytest.mark.skipif(
    GPUS < 2, reason=f"needs two GPUs for a pipeline, here are {GPUS}"
)


@functools.cache
def losses(schedule: str | None, **overrides: str | int | bool | None) -> tuple[str, ...]:
    """The losses that a run prints, digit for digit. ``overrides``: flags, for `model_flags`."""
    ranks = 4 if GPUS >= 4 else 2
    flags: dict[str, object] = {
        "num_layers": 8,
        "pipeline_model_parallel_size": ranks,
        "pipeline_schedule": schedule,
        "transformer_impl": "local",
        "no_masked_softmax_fusion": True,
        "no_gradient_accumulation_fusion": True,
        "no_persist_layer_norm": True,
        "train_iters": 5,
    }
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "-m", "megatron_ext", str(SCRIPT)),
            *model_flags(**flags | overrides),
        ],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = tuple(re.findall(r"lm loss: (\S+)", ended.stdout))
    assert len(found) == 5, ended.stdout[-3000:]
    return found
