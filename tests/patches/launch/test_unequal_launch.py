"""Tests of `megatron-ext plan --lengths FILE -- COMMAND`, which predicts the gain of ordering and
dealing the microbatches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.launch.command.launch_words import read_launch
from megatron_ext.launch.planner import launch_job, parsed_launch
from megatron_ext.planner.candidate import VocabMethod
from tests.helpers.few_families import only_families
from tests.helpers.megatron_runs import SCRIPT, model_flags
from tests.patches.launch.test_launch_job import FLAGS
from tests.unit.plan.test_unequal import lengths

PACKED: dict[str, Any] = {
    "pipeline_model_parallel_size": 4,
    "num_virtual_stages_per_pipeline_rank": None,
    "seq_length": 16384,
    "max_position_embeddings": 16384,
    "position_embedding_type": "rope",
    "dataloader_inter_document_masking": True,
    "global_batch_size": 16,
    "micro_batch_size": 1,
}


@pytest.fixture(autouse=True)
def few_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a login node without a GPU, and compare only the schedule zb-v, without a search."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    only_families(monkeypatch, "zb-v")
    monkeypatch.setattr(parsed_launch, "_METHODS", frozenset([VocabMethod.NAIVE]))
    monkeypatch.setattr(launch_job, "_layouts", lambda parsed: None)
    monkeypatch.setattr(launch_job, "long_sequences_of_launch", lambda *of: None)


def planned(file: Path, *words: str, **overrides: object) -> str:
    flags = model_flags(**(FLAGS | PACKED | overrides))
    launch = ["torchrun", "--nproc-per-node", "8", str(SCRIPT), *flags, *words]
    result = CliRunner().invoke(
        app, ["plan", "--gpu", "h100", "--lengths", str(file), "--", *launch]
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_launch_keeps_its_schedule_and_gets_the_flags(tmp_path: Path) -> None:
    told = planned(lengths(tmp_path, 4, 16, 16384), "--pipeline-schedule", "zb-v")
    assert "\nunequal:   " in told and "4 steps of 8 microbatches on each of 2 replicas" in told
    command = told.partition("write:\n")[2].splitlines()[0]
    words = read_launch(command.split()).arguments
    assert "--pipeline-deal-microbatches" in words
    assert words[words.index("--pipeline-microbatch-order") + 1] == "small-ends"
    assert "verdict:   keep it" in told
    assert words[words.index("--pipeline-schedule") + 1] == "zb-v"
    assert "-m megatron_ext" in command


def test_replicas_that_share_experts_are_said(tmp_path: Path) -> None:
    """`plan --lengths` says that replicas share experts. Each pass then waits for the longest
    microbatch among the replicas, so a step takes longer."""
    file = lengths(tmp_path, 4, 16, 16384)
    experts = {
        "num_experts": 4,
        "moe_router_topk": 2,
        "disable_bias_linear": True,
        "moe_token_dispatcher_type": "alltoall",
    }

    def seconds(ranks: int) -> float:
        told = planned(file, **experts, expert_model_parallel_size=ranks)
        assert ("of which 2 share experts and wait for one another" in told) is (ranks == 2)
        (found,) = re.findall(r"unequal: +(\S+) s a step", told)
        return float(found)

    assert seconds(2) > 1.02 * seconds(1)


def test_a_launch_with_equal_microbatches_says_why_nothing_is_arranged(tmp_path: Path) -> None:
    file = lengths(tmp_path, 4, 16, 16384)
    told = planned(file, dataloader_inter_document_masking=None)
    assert re.search(r"unequal:   nothing is arranged, which may save \d.\d%: --pipeline-", told)
    assert "all microbatches cost the same" in told
    assert (
        "order: " not in told and "--pipeline-microbatch-order" not in told.partition("write:")[2]
    )


def test_more_tokens_than_a_microbatch_has(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("16385\n" * 16)
    with pytest.raises(AssertionError, match="line 1: 16385 tokens are too many, as a microbatch"):
        planned(file)
