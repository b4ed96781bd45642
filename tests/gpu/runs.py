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

from tests.helpers.megatron_runs import SCRIPT, model_flags

GPUS = torch.cuda.device_count()
RANKS = 4 if GPUS >= 4 else 2
ITERATIONS = 5

needs_two_gpus = pytest.mark.skipif(
    GPUS < 2, reason=f"needs two GPUs for a pipeline, here are {GPUS}"
)

needs_four_gpus = pytest.mark.skipif(
    GPUS < 4, reason=f"needs four GPUs for two pipeline ranks of two each, here are {GPUS}"
)


def torchrun(ranks: int, *words: str) -> str:
    """Return the output of ``torchrun ... WORDS``; if a rank fails, fail with the end of its
    output."""
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), *words),
        ],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            # The kernels of all streams share one hardware queue. Megatron requires this for tensor
            # parallelism. A message that waits then blocks all later kernels, so this setting is
            # the strictest test.
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            # HybridEP reads this variable: the number of ranks of an expert-parallel group.
            "NUM_OF_RANKS_PER_NVLINK_DOMAIN": "2",
            # Without caches the first pass compiles while receives are posted, as on a new machine.
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


@functools.cache
def losses(
    schedule: str | None,
    script: Path = SCRIPT,
    **overrides: str | int | bool | tuple[str, ...] | None,
) -> tuple[str, ...]:
    """Return the losses that a run prints, digit for digit: of the first iteration and of every
    ``log_interval``, from ``ckpt_step`` on if that is given. ``overrides`` are flags for
    `model_flags`."""
    flags: dict[str, object] = {
        "num_layers": 8,
        "pipeline_model_parallel_size": RANKS,
        "pipeline_schedule": schedule,
        "transformer_impl": "local",
        "no_masked_softmax_fusion": True,
        "no_gradient_accumulation_fusion": True,
        "no_persist_layer_norm": True,
        "swiglu": True,  # this activation function is compiled, and most models have it
        "disable_bias_linear": True,
        "train_iters": ITERATIONS,
    }
    printed = torchrun(RANKS, "-m", "megatron_ext", str(script), *model_flags(**flags | overrides))
    texts = tuple(re.findall(r"lm loss: (\S+)", printed))
    first = int(str(overrides.get("ckpt_step") or 0)) + 1
    last = int(str(overrides.get("train_iters") or ITERATIONS))
    interval = int(str(overrides.get("log_interval") or 1))
    logged = [i for i in range(first, last + 1) if i == first or i % interval == 0]
    assert len(texts) == len(logged), printed[-3000:]
    return texts
