"""Small inputs that failed, from public reports and scripts, each in its shortest form."""

from __future__ import annotations

import shlex

from typer.testing import CliRunner, Result

from megatron_ext.cli import app
from tests.helpers.megatron_runs import SCRIPT

SMALL = shlex.split(
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --train-iters 100 --lr 1e-4 --bf16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 32000 --eval-iters 0 --eval-interval 1000"
)


def doctor(ranks: int, flags: str) -> Result:
    """`megatron-ext doctor` of a small model on so many ranks."""
    launch = ["torchrun", "--nproc-per-node", str(ranks), str(SCRIPT), *SMALL, *shlex.split(flags)]
    return CliRunner().invoke(app, ["doctor", "--", *launch], terminal_width=10_000)


def test_case_1_a_layout_of_six_layers_for_eight() -> None:
    """doctor, plan and each rank ended with ``AssertionError: ([3, 3], 8)`` and a traceback, where
    Megatron has a sentence."""
    result = doctor(
        8,
        "--global-batch-size 64 --num-layers 8 --pipeline-model-parallel-size 2 "
        "--pipeline-model-parallel-layout Ettt|tttL",
    )
    assert result.exit_code == 1, result.output
    assert "Number of decoder layers 6must match num_layers 8" in " ".join(result.output.split())
