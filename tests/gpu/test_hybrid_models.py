"""Tests of Mamba layers, which no CPU runs, in hybrid models. They were written without a GPU, and
have not run yet.

scripts/gpu_tests.sh        # on a node with two GPUs or more
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from megatron_ext.compile.registry import choose
from tests.gpu.runs import RANKS, losses, needs_two_gpus


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(is_missing("mamba_ssm"), reason="Mamba layers need mamba_ssm"),
    pytest.mark.skipif(
        is_missing("transformer_engine"),
        reason="Megatron's hybrid models consist of Transformer Engine's layers",
    ),
    needs_two_gpus,
]

SCRIPT = Path(__file__).with_name("pretrain_hybrid.py")


def trained(schedule: str | None, stages: int, **more: str | int) -> tuple[str, ...]:
    """Return the losses of a model whose layers are the same for any number of stages."""
    layers = "M-*M" * RANKS
    own = len(layers) // stages
    return losses(
        schedule,
        SCRIPT,
        num_layers=None,
        hybrid_layer_pattern="|".join(layers[s * own : (s + 1) * own] for s in range(stages)),
        transformer_impl="transformer_engine",
        **more,
    )


@pytest.mark.covers("C", ("line", "loop", "v"), hybrid_layer_pattern="M-*")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved", "interleaved-zb", "zb-v"])
def test_losses_are_stocks(schedule: str, tmp_path: Path) -> None:
    resumed: dict[str, str | int] = {"load": str(tmp_path), "ckpt_step": 2}
    trained(None, RANKS, save=str(tmp_path), save_interval=2)
    stages = choose(schedule).place(RANKS).stages
    assert trained(schedule, stages, **resumed) == trained(None, RANKS, **resumed)
