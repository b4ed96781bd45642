"""`megatron-ext plan --half-pipeline -- LINE`: the line, and the same on half of its ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.cost_model.gpus import parse_gpu
from megatron_ext.doctor.words import Launch
from megatron_ext.launch_planner import parsed_launch
from megatron_ext.launch_planner.alternatives.half_of_launch import on_half
from megatron_ext.launch_planner.launch_plan import (
    LaunchRequest,
    ParsedLaunch,
    plan_halves,
    with_launch,
)
from megatron_ext.planner import planner
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.half_pipeline import Division, Halves
from tests.helpers.megatron_runs import SCRIPT, model_flags

FLAGS: dict[str, Any] = {
    "pipeline_model_parallel_size": 4,
    "num_layers": 16,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "seq_length": 1024,
    "max_position_embeddings": 1024,
    "use_distributed_optimizer": True,
    "bf16": True,
    "padded_vocab_size": 32000,
    "vocab_size": 31999,
}
NAMES = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)

OURS = ("--pipeline-schedule", "zb-v")


@pytest.fixture(autouse=True)
def few_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a login node, and without a search."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(planner, "all_specs", lambda: ["1f1b", "interleaved", "zb-v"])
    monkeypatch.setattr(parsed_launch, "_METHODS", frozenset([VocabMethod.NAIVE]))


def asked(**overrides: object) -> LaunchRequest:
    words = tuple(model_flags(**(FLAGS | overrides)))
    return LaunchRequest(Launch(str(SCRIPT), False, words, world_size=8), gpu=parse_gpu("h100"))


def made(**overrides: object) -> Halves:
    return plan_halves(asked(**overrides))


def test_a_line_and_half_of_it() -> None:
    halves = made()
    assert str(halves.whole.division) == "PP 4 x DP 2" and halves.whole.division.microbatches == 4
    assert str(halves.half.division) == "PP 2 x DP 4" and halves.half.division.microbatches == 2
    before, after = halves.whole.plan.best, halves.half.plan.best
    assert before is not None and before.memory is not None
    assert after is not None and after.memory is not None
    memory = before.memory, after.memory
    gradients = [max(rank.model.gradients for rank in ranks) for ranks in memory]
    assert 1.3 * gradients[0] < gradients[1] < 2 * gradients[0]  # the output layer is on one rank
    assert halves.whole.reduction is not None and halves.half.reduction is not None
    assert halves.half.reduction.gradients > halves.whole.reduction.gradients > 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"num_layers_per_virtual_pipeline_stage": 1},
            {"num_layers_per_virtual_pipeline_stage": 2},
        ),
        (
            {"num_virtual_stages_per_pipeline_rank": 2},
            {"num_virtual_stages_per_pipeline_rank": 2},
        ),
        (
            {"pipeline_model_parallel_layout": "Et*3|t*5|t*5|t*3L"},
            {"pipeline_model_parallel_layout": "Etttttttt|ttttttttL"},
        ),
        (
            {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 3},
            {"decoder_first_pipeline_num_layers": 8, "decoder_last_pipeline_num_layers": 8},
        ),
        ({"account_for_loss_in_pipeline_split": True, "num_layers": 15}, {}),
    ],
)
def test_two_stages_become_one(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """With as many virtual stages as before, and Megatron's validation takes it."""

    def halved(read: ParsedLaunch) -> dict[str, Any]:
        half = on_half(read.variants, read.validated, Division(4, 2, 4))
        half.validated(str(half.own), VocabMethod.NAIVE)
        args = half.args
        return {name: getattr(args, name) for name in NAMES if getattr(args, name) is not None}

    assert with_launch(asked(**given), halved) == expected


def test_what_is_written_for_half_of_it() -> None:
    layout = made(pipeline_model_parallel_layout="Et*3|t*5|t*5|t*3L")
    best = layout.half.plan.best
    assert best is not None and best.schedule == "zb-v"
    assert (
        layout.written.added[:2] == ("--pipeline-model-parallel-size", "2")
        and not layout.written.dropped
    )
    assert layout.written.added[2:4] == (
        "--pipeline-model-parallel-layout",
        "Etttt|tttt|tttt|ttttL",
    )
    assert layout.written.added[4:6] == ("--pipeline-schedule", "zb-v")


def test_the_command() -> None:
    words = ["plan", "--half-pipeline", "--gpu", "h100", "--world-size", "8"]
    line = ["--", str(SCRIPT), *model_flags(**FLAGS)]
    text = CliRunner().invoke(app, [*words, *line]).output
    assert "16 layers on 8 ranks (PP 4 x DP 2), 4 microbatches of 1 x 1024 tokens" in text
    assert "write for PP 2 x DP 4: --pipeline-model-parallel-size 2 --pipeline-sched" in text
    data = json.loads(CliRunner().invoke(app, [*words, "--json", *line]).stdout)
    assert data["written"]["added"][1] == "2" and data["half"]["division"]["ranks"] == 2
    given = CliRunner().invoke(app, [*words, "--costs", "f=1,i=1,w=1", *line, *OURS])
    assert given.exit_code == 2 and "drop --costs" in given.output
