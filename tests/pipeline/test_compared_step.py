"""First step compared with Megatron's own function where unknown sources are allowed.

A patch whose target now does something else trains wrong numbers without an error.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config import ALLOW_UNKNOWN
from tests.helpers.combinations import at_night
from tests.helpers.megatron_runs import EXPERTS
from tests.helpers.trainings import Training

DROPPING = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
PREDICTING = {"mtp_num_layers": 1, "position_embedding_type": "rope"}
PAIR = Training(2, {"pipeline_model_parallel_size": 2, "num_layers": 4, "train_iters": 3})
UNTIED = {"untie_embeddings_and_output_weights": True}
ENTRY = "a.module:function@0123456789ab"


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_UNKNOWN, ENTRY)


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("zb-h1", DROPPING),
        *at_night(
            (
                "interleaved-zb",
                UNTIED
                | PREDICTING
                | EXPERTS
                | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
            ),
            (
                "1f1b",
                {"bf16": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True},
            ),
        ),
    ],
)
def test_the_first_step_is_compared_and_training_goes_on(
    schedule: str, flags: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Random numbers, the data, counts of routers and the log are as if it had not been run
    before."""
    training = PAIR.but(**flags)
    if schedule == "interleaved-zb":
        training.resume_as_stock(pipeline_schedule=schedule)
    else:
        training.start_as_stock(pipeline_schedule=schedule)
    told = capfd.readouterr()
    assert "gradients and losses of Megatron's own function" in told.out + told.err


def test_a_difference_ends_the_training() -> None:
    wrong = replace(PAIR, script=Path(__file__).parent / "pretrain_gpt_patched_wrong.py")
    with pytest.raises(AssertionError, match="the first step differs from that of Megatron's own"):
        wrong.run(pipeline_schedule="zb-h1")


def test_a_v_says_that_it_is_not_compared(capfd: pytest.CaptureFixture[str]) -> None:
    PAIR.run(pipeline_schedule="zb-v", train_iters=1)
    told = capfd.readouterr()
    assert (
        "is not compared with Megatron's own, since the schedule has other" in told.out + told.err
    )
