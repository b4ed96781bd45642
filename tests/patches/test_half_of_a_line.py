"""`megatron-ext plan --half-pipeline -- COMMAND`: the line, and the same on half of its ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.cost_model.gpus import parse_gpu
from megatron_ext.launch_command.words import Launch
from megatron_ext.launch_planner import parsed_launch
from megatron_ext.launch_planner.alternatives.half_of_launch import half_of_launch, on_half
from megatron_ext.launch_planner.launch_plan import plan_line
from megatron_ext.launch_planner.parsed_launch import LaunchRequest, ParsedLaunch, with_launch
from megatron_ext.planner import planner
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.half_pipeline import Division
from megatron_ext.planner.verdict import Alternative
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


def halves(**overrides: object) -> list[Alternative]:
    return with_launch(asked(**overrides), half_of_launch)


def test_half_of_a_launch_holds_more_of_the_model() -> None:
    fastest, *_ = halves()
    assert fastest.division == "PP 2 x DP 4"
    problem, memory = fastest.candidate.variant.problem, fastest.candidate.memory
    assert (problem.ranks, problem.microbatches) == (2, 2) and memory is not None
    whole = plan_line(asked()).verdict.baseline
    assert whole is not None and whole.candidate.memory is not None
    gradients = [
        max(rank.model.gradients for rank in ranks) for ranks in (whole.candidate.memory, memory)
    ]
    assert 1.3 * gradients[0] < gradients[1] < 2 * gradients[0]  # the output layer is on one rank
    outside = [one.seconds - one.candidate.step for one in (whole, fastest)]
    assert outside[1] > outside[0] > 0  # twice the gradients are reduced


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
    laid_out = halves(pipeline_model_parallel_layout="Et*3|t*5|t*5|t*3L")
    (zb_v,) = (one for one in laid_out if one.candidate.schedule == "zb-v")
    written = zb_v.write()
    assert written.added[:2] == ("--pipeline-model-parallel-size", "2") and not written.dropped
    assert written.added[2:4] == ("--pipeline-model-parallel-layout", "Etttt|tttt|tttt|ttttL")
    assert written.added[4:6] == ("--pipeline-schedule", "zb-v")


def test_megatrons_own_schedule_needs_no_flag_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "all_specs", lambda: ["interleaved"])
    (loop,) = halves()
    chunks = str(loop.candidate.report.vpp)
    size = ("--pipeline-model-parallel-size", "2")
    assert loop.write().added == (*size, "--num-virtual-stages-per-pipeline-rank", chunks)


def test_the_command() -> None:
    words = ["plan", "--half-pipeline", "--gpu", "h100", "--world-size", "8"]
    launch = ["--", str(SCRIPT), *model_flags(**FLAGS)]
    told = json.loads(CliRunner().invoke(app, [*words, "--json", *launch]).stdout)
    assert {one["division"] for one in told["others"]} >= {"PP 2 x DP 4"}
    assert "on PP 2 x DP 4" in CliRunner().invoke(app, [*words, "--all", *launch]).output
    given = CliRunner().invoke(app, [*words, "--costs", "f=1,i=1,w=1", *launch, *OURS])
    assert given.exit_code == 2 and "drop --costs" in given.output
