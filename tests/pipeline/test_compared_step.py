"""First step compared with Megatron's own function where unknown sources are allowed.

A patch whose target now does something else trains wrong numbers without an error.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.adapter.stock.compared_step import _difference
from megatron_ext.config import ALLOW_UNKNOWN
from tests.helpers.combinations import at_night, nightly
from tests.helpers.megatron_runs import EXPERTS
from tests.helpers.packed import packed_on_the_cpu
from tests.helpers.rehearsals import rehearsed
from tests.helpers.trainings import Training

DROPPING = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
PREDICTING = {"mtp_num_layers": 1, "position_embedding_type": "rope"}
PAIR = Training(2, {"pipeline_model_parallel_size": 2, "num_layers": 4, "train_iters": 3})
UNTIED = {"untie_embeddings_and_output_weights": True}
ENTRY = "a.module:function@0123456789ab"


def assert_compared(capfd: pytest.CaptureFixture[str]) -> None:
    told = capfd.readouterr()
    assert "gradients and losses of Megatron's own function" in told.out + told.err


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
            ("zb-h1", {"fp16": True}),
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
    assert_compared(capfd)


def test_a_difference_ends_the_training() -> None:
    wrong = replace(PAIR, script=Path(__file__).parent / "pretrain_gpt_patched_wrong.py")
    with pytest.raises(AssertionError, match="the first step differs from that of Megatron's own"):
        wrong.run(pipeline_schedule="zb-h1")


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        ([math.inf, math.nan, 1.0], [math.inf, math.nan, 1.5], 0.5),
        ([math.inf, 1.0], [-math.inf, 1.0], math.inf),
        ([math.nan, 1.0], [2.0, 1.0], math.inf),
        ([2.0, 1.0], [math.inf, 1.0], math.inf),
    ],
)
def test_values_that_are_not_finite_in_both_are_alike(
    a: list[float], b: list[float], difference: float
) -> None:
    """Gradients of the first steps in fp16 overflow, and the training ended."""
    assert _difference(torch.tensor(a), torch.tensor(b)) == difference


@nightly("a microbatch of one sequence is compared by day")
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-zb"])
def test_a_microbatch_packed_into_one_row_is_compared(
    schedule: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Megatron's own messages have a row for each of its samples, and the training ended."""
    packs = {"dataloader_inter_document_masking": True, "position_embedding_type": "rope"}
    training = PAIR.but(**packs, micro_batch_size=2, global_batch_size=8)
    replace(training, around=packed_on_the_cpu).run(pipeline_schedule=schedule)
    assert_compared(capfd)


@nightly("a V is not compared by day")
def test_a_rehearsed_rank_is_not_compared(capfd: pytest.CaptureFixture[str]) -> None:
    """Megatron's own messages bring it whatever was in memory."""
    record = rehearsed(0, 2, PAIR.words(pipeline_schedule="zb-h1", pipeline_costs="f=1,i=1,w=1"))
    assert record.trained == 2
    told = capfd.readouterr()
    assert "own, since a rank is rehearsed alone" in told.out + told.err


@nightly("another step is compared by day")
def test_a_later_step_saves_its_gradients_while_reductions_overlap() -> None:
    """Megatron's own step had told it to wait for gradients, which come without its hooks."""
    PAIR.but(overlap_grad_reduce=True, save_wgrads_interval=2).saved(pipeline_schedule="zb-h1")


def test_a_v_says_that_it_is_not_compared(capfd: pytest.CaptureFixture[str]) -> None:
    PAIR.run(pipeline_schedule="zb-v", train_iters=1)
    told = capfd.readouterr()
    assert (
        "is not compared with Megatron's own, since the schedule has other" in told.out + told.err
    )
