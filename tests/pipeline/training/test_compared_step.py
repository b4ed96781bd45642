"""Tests of the comparison of a training's first step with Megatron's own function.

The comparison runs if a user allows a version of Megatron's sources that we do not know. A patch
whose target now does something else would train wrong numbers without an error.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.adapter.stock import compared_step
from megatron_ext.adapter.stock.compared_step import _difference, _forget_packed_lengths
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
    """A training continues after its compared first step as if there had been no comparison: random
    numbers, data, the routers' counts and the log are the same."""
    training = PAIR.but(**flags)
    if schedule == "interleaved-zb":
        training.resume_as_stock(pipeline_schedule=schedule)
    else:
        training.start_as_stock(pipeline_schedule=schedule)
    assert_compared(capfd)


def test_a_difference_ends_the_training() -> None:
    wrong = replace(
        PAIR, script=Path(__file__).parents[1] / "scripts" / "pretrain_gpt_patched_wrong.py"
    )
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
    """Gradients that are infinite or NaN in both compared steps count as equal. In fp16 the
    gradients of the first steps overflow, and the comparison used to end the training."""
    assert _difference(torch.tensor(a), torch.tensor(b)) == difference


@nightly("a microbatch of one sequence is compared by day")
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-zb"])
def test_a_microbatch_packed_into_one_row_is_compared(
    schedule: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first step is compared if two samples are packed into one row. The comparison used to end
    the training, because the messages of Megatron's own schedule have a row for each sample."""
    packs = {"dataloader_inter_document_masking": True, "position_embedding_type": "rope"}
    training = PAIR.but(**packs, micro_batch_size=2, global_batch_size=8)
    replace(training, around=packed_on_the_cpu).run(pipeline_schedule=schedule)
    assert_compared(capfd)


@nightly("a V is not compared by day")
def test_a_rehearsed_rank_is_not_compared(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that is rehearsed alone compares no step, because Megatron's own messages would bring
    it arbitrary memory contents."""
    record = rehearsed(0, 2, PAIR.words(pipeline_schedule="zb-h1", pipeline_costs="f=1,i=1,w=1"))
    assert record.trained == 2
    told = capfd.readouterr()
    assert "own, since a rank is rehearsed alone" in told.out + told.err


@nightly("another step is compared by day")
def test_a_later_step_saves_its_gradients_while_reductions_overlap() -> None:
    """--save-wgrads-interval and --overlap-grad-reduce go together after a compared first step. The
    compared step, which is Megatron's own, used to leave Megatron waiting for gradients from its
    hooks, and ours come without these hooks."""
    PAIR.but(overlap_grad_reduce=True, save_wgrads_interval=2).saved(pipeline_schedule="zb-h1")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"pipeline_schedule": "zb-v"}, "the schedule has other"),
        *at_night(
            (
                {"pipeline_schedule": "zb-h1", "pipeline_recompute": "first:1"},
                "Megatron's own function would need the memory that --pipeline-recompute",
            ),
            (
                {
                    "pipeline_schedule": "interleaved-zb",
                    "microbatch_group_size_per_virtual_pipeline_stage": 3,
                    "global_batch_size": 4,
                },
                "Megatron's own does not run 4 microbatches on 2 ranks in groups of 3",
            ),
            (
                {
                    "pipeline_schedule": "interleaved-zb",
                    "microbatch_group_size_per_virtual_pipeline_stage": 4,
                    "global_batch_size": 2,
                },
                "Megatron's own does not run 2 microbatches on 2 ranks in groups of 4",
            ),
        ),
    ],
)
def test_a_step_that_is_not_compared_says_why(
    flags: dict[str, Any], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    PAIR.run(**flags, train_iters=1)
    told = capfd.readouterr()
    assert f"is not compared with Megatron's own, since {why}" in told.out + told.err


@pytest.mark.parametrize(("interval", "saved"), [(1, True), (2, False), (5, True), (None, False)])
def test_passes_of_a_step_that_megatron_saves_are_noticed(
    interval: int | None, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison recognizes a step whose gradients Megatron is about to save
    (--save-dgrads-interval). Megatron saves them by hooks on Transformer Engine's layers, which no
    training in these tests has, so only the decision is tested."""
    args = SimpleNamespace(save_dgrads_interval=interval)
    monkeypatch.setattr(compared_step, "training_global", lambda name: args)
    monkeypatch.setattr(compared_step, "current_iteration", lambda: 5)
    assert compared_step._saved_now() == ("save_dgrads_interval" if saved else None)


def test_lengths_of_packs_that_the_comparison_ran_are_not_counted() -> None:
    """The comparison removes the packed lengths that its own passes added to Megatron's statistics.
    Otherwise these lengths would count three times in Megatron's TFLOP/s."""
    from megatron.training import training

    training.update_seqlen_stats_from_cu_seqlens(torch.tensor([0, 3, 8]))
    _forget_packed_lengths()
    assert training.consume_seqlen_stats_in_iteration() == (None, None)
    training.update_seqlen_stats_from_cu_seqlens(torch.tensor([0, 3, 8]))
    assert training.consume_seqlen_stats_in_iteration() == (8, 34)
