"""Small inputs that failed, from public reports and scripts, each in its shortest form."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from typer.testing import CliRunner, Result

from megatron_ext.cli import app
from tests.helpers.combinations import at_night
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import (
    EXPERTS,
    SCRIPT,
    assert_same,
    losses,
    model_flags,
    train,
    train_or_fail,
)
from tests.helpers.trainings import Training

Flags = dict[str, object]

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


EXPERTS_LATER: Flags = {
    **EXPERTS,
    "num_layers": 8,
    "moe_layer_freq": "([0]*4+[1]*4)",
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "use_distributed_optimizer": True,
    "untie_embeddings_and_output_weights": True,
    "dist_ckpt_optim_fully_reshardable": True,
    "train_iters": 3,
}
OFFLOADED: Flags = {
    "bf16": True,
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
}


@pytest.mark.parametrize("more", [{}, *at_night(OFFLOADED)], ids=lambda more: "-".join(more))
def test_case_12_experts_in_later_layers_are_saved(more: Flags) -> None:
    """The first save of a distributed optimizer on the CPU ended in an AssertionError of Megatron's
    if the first stage has no experts: torch's AdamW counts steps in the states of parameters, and
    its experts' optimizer has none. Under a V another rank has these experts: what it loads must
    be the step of the others, too."""
    Training(4, EXPERTS_LATER | more, saved_at=2).resume_as_stock(pipeline_schedule="zb-v")


def first_stage_frozen(*args: Any, **kwargs: Any) -> Any:
    model = drawn_by_name(*args, **kwargs)
    if parallel_state.get_pipeline_model_parallel_rank() == 0:
        model.requires_grad_(requires_grad=False)
    return model


def test_case_12_a_frozen_stage_is_saved(tmp_path: Path) -> None:
    """As experts in later layers: no parameter of the first stage is trained."""
    flags: Flags = {
        "pipeline_model_parallel_size": 2,
        "untie_embeddings_and_output_weights": True,
        "use_distributed_optimizer": True,
        "train_iters": 1,
        "save": tmp_path,
        "save_interval": 1,
    }
    Training(2, flags, build=first_stage_frozen).run()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"


DOCUMENTS: Flags = {
    "pipeline_model_parallel_size": 2,
    "untie_embeddings_and_output_weights": True,
    "reset_position_ids": True,
    "eod_mask_loss": True,
}
MASKED = DOCUMENTS | {"reset_attention_mask": True, "position_embedding_type": "rope"}


@pytest.fixture
def short_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of up to 24 tokens, so that most samples hold the end of one."""
    monkeypatch.setattr(MockGPTLowLevelDataset, "max_sequence_length", 24)


@pytest.mark.usefixtures("short_documents")
def test_case_5_documents_stay_apart_or_the_schedule_is_refused() -> None:
    """zb-v on two ranks trained other losses than stock's, in silence: its inner stages got no mask
    of documents. A line of two stages gets it on both."""
    stock = train(2, model_flags(**MASKED))
    assert losses(stock) != losses(train(2, model_flags(**MASKED | {"reset_attention_mask": None})))
    assert_same(train(2, model_flags(**MASKED, pipeline_schedule="zb-h1")), stock)
    for rank in train_or_fail(2, model_flags(**MASKED, pipeline_schedule="zb-v")):
        assert "SystemExit: 2" in rank.error
        assert "reset_attention_mask=True: layers apply the mask" in rank.error
        assert "--dataloader-inter-document-masking" in rank.error


@pytest.mark.usefixtures("short_documents")
def test_case_5_positions_and_masked_losses_of_documents_stay_allowed(tmp_path: Path) -> None:
    """--reset-position-ids and --eod-mask-loss are read by the first and the last stage alone."""
    saves = {"save": tmp_path, "save_interval": 3}
    stock = train(2, model_flags(**DOCUMENTS, **saves))
    for name in ("reset_position_ids", "eod_mask_loss"):
        assert losses(train(2, model_flags(**DOCUMENTS | {name: None}))) != losses(stock)
    loads = {"load": tmp_path, "ckpt_step": 3}
    assert_same(train(2, model_flags(**DOCUMENTS, **loads, pipeline_schedule="zb-v")), stock)
