"""Tests of sizes with which a rank would end in the middle of its setup, as ranks of users did.

A layout with a layer too few used to end `megatron-ext doctor`, `plan` and every rank with
``AssertionError: ([2, 1], 4)``. --moe-layer-freq 0 and --seq-length 0 used to end them in divisions
by zero. `doctor` used to accept what Megatron finds only in its first step, such as more experts to
choose than there are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from megatron_ext.config import PipelineConfig
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.launch_words import Launch
from megatron_ext.launch.doctor.check import check_launch
from megatron_ext.launch.doctor.launch_report import Severity
from tests.helpers.megatron_runs import EXPERTS, SCRIPT, model_flags

BASE: dict[str, object] = {"pipeline_model_parallel_size": 2, "transformer_impl": "local"}
WINDOW: dict[str, object] = {"window_size": "8,0"}
LINEAR: dict[str, object] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
MTP: dict[str, object] = {"position_embedding_type": "rope", "mtp_num_layers": 1}

IMPOSSIBLE: dict[str, tuple[dict[str, object], str]] = {
    "a layer too few": (
        {"pipeline_model_parallel_layout": "Ett|tL"},
        "--pipeline-model-parallel-layout Ett|tL: Number of decoder layers 3must match "
        "num_layers 4",
    ),
    "a layer too many": (
        {"pipeline_model_parallel_layout": "Ett|tttL"},
        "Number of decoder layers 5must match num_layers 4",
    ),
    "no embedding": ({"pipeline_model_parallel_layout": "tt|ttL"}, "The first layer must be"),
    "no loss": ({"pipeline_model_parallel_layout": "Ett|tt"}, "The last layer must be loss"),
    "two losses": (
        {"pipeline_model_parallel_layout": "Ett|ttLL"},
        "Loss must be specified exactly once",
    ),
    "nothing": ({"pipeline_model_parallel_layout": "|"}, "layout |: it has no layers"),
    "no multi-token prediction": (
        {"pipeline_model_parallel_layout": "Ett|ttL", **MTP},
        "Number of mtp layers in layout must match mtp_num_layers",
    ),
    "too few virtual stages": (
        {"pipeline_model_parallel_layout": "Et|t|t|L"},
        "Number of decoder layers 3must match num_layers 4",
    ),
    "experts in no layer in zero": ({**EXPERTS, "moe_layer_freq": 0}, "--moe-layer-freq 0: "),
    "experts in a list too short": (
        {**EXPERTS, "moe_layer_freq": "[1,0]"},
        "--moe-layer-freq has 2 numbers, and the model has 4 layers",
    ),
    "experts in a list too long": (
        {**EXPERTS, "moe_layer_freq": "[1]*5"},
        "--moe-layer-freq has 5 numbers, and the model has 4 layers",
    ),
    "a third kind of layer": (
        {**EXPERTS, "moe_layer_freq": "[1,0,2,0]"},
        "--moe-layer-freq has 2 in its list: write 0 or 1",
    ),
    "linear attention": ({**LINEAR, "linear_attention_freq": 0}, "--linear-attention-freq 0: "),
    "windows": ({**WINDOW, "window_attn_skip_freq": 0}, "--window-attn-skip-freq 0: "),
    "windows in a list too short": (
        {**WINDOW, "window_attn_skip_freq": "[1,0]"},
        "--window-attn-skip-freq has 2 numbers",
    ),
    "no token": ({"seq_length": 0}, "--seq-length 0: there must be at least one"),
    "fewer tokens than none": ({"seq_length": -1}, "--seq-length -1: there must be"),
    "no layer": ({"num_layers": 0}, "--num-layers 0: there must be at least one"),
    "no width": ({"hidden_size": 0}, "--hidden-size 0: there must be at least one"),
    "no head": ({"num_attention_heads": 0}, "--num-attention-heads 0: there must be"),
    "no microbatch": ({"micro_batch_size": 0}, "--micro-batch-size 0: there must be"),
    "no batch": ({"global_batch_size": 0}, "--global-batch-size 0: there must be"),
    "no rank": ({"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size 0: "),
    "no rank of experts": (
        {**EXPERTS, "expert_model_parallel_size": 0},
        "--expert-model-parallel-size 0: ",
    ),
    "no virtual stage": (
        {"num_virtual_stages_per_pipeline_rank": 0},
        "--num-virtual-stages-per-pipeline-rank 0: ",
    ),
    "no microbatch in a group": (
        {"microbatch_group_size_per_virtual_pipeline_stage": 0},
        "--microbatch-group-size-per-virtual-pipeline-stage 0: ",
    ),
    "no iteration between lines": ({"log_interval": 0}, "--log-interval 0: there must be"),
    "recompute without an end": (
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 0,
        },
        "--recompute-num-layers 0: ",
    ),
    "query groups": (
        {"group_query_attention": True, "num_query_groups": 3, "num_attention_heads": 4},
        "--num-query-groups 3: 4 heads (--num-attention-heads) cannot share 3 keys evenly",
    ),
    "no query group": (
        {"group_query_attention": True, "num_query_groups": 0},
        "--num-query-groups 0: ",
    ),
    "more experts chosen than there are": (
        {**EXPERTS, "moe_router_topk": 5},
        "--moe-router-topk 5: there are 4 experts to choose from",
    ),
    "no expert chosen": ({**EXPERTS, "moe_router_topk": 0}, "--moe-router-topk 0: "),
    "experts on more ranks than there are": (
        {**EXPERTS, "expert_model_parallel_size": 2},
        "--expert-model-parallel-size 2: the experts' tensor x expert x pipeline parallel sizes "
        "are 1 x 2 x 2 = 4, which does not divide 2 ranks",
    ),
}

# Sizes that look impossible and train under Megatron.
POSSIBLE: dict[str, dict[str, object]] = {
    "experts' layers of a model without experts": {"moe_layer_freq": 0},
    "no experts": {"num_experts": 0, "moe_router_topk": 0},
    "every layer, counted backwards": {**EXPERTS, "moe_layer_freq": -1},
    "a list": {**EXPERTS, "moe_layer_freq": "[1,0]*2"},
    "windows in a list that goes on": {**WINDOW, "window_attn_skip_freq": "[1,0]*4"},
    "no multi-token prediction": {"mtp_num_layers": 0},
    "empty stages": {"pipeline_model_parallel_layout": "E|ttttL"},
    "recompute of no layer": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 0,
    },
    "query groups without grouped queries": {"num_query_groups": 3},
    "no evaluation": {"eval_iters": 0},
}


def validate(overrides: Mapping[str, object], schedule: str | None = None, ranks: int = 2) -> None:
    args = megatron_arguments.parse_arguments(model_flags(**(BASE | dict(overrides)))).args
    with megatron_arguments.on_gpus(args):
        megatron_arguments.validate(args, PipelineConfig(schedule=schedule), ranks)


@pytest.mark.parametrize("schedule", [None, "zb-v"])
@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_sizes_that_end_a_rank_are_refused_by_their_flag(case: str, schedule: str | None) -> None:
    overrides, text = IMPOSSIBLE[case]
    with pytest.raises(ValueError, match=re.escape(text)):
        validate(overrides, schedule)


@pytest.mark.parametrize("case", ["a layer too few", "experts in no layer in zero", "no token"])
def test_doctor_says_so_in_one_line(case: str) -> None:
    overrides, text = IMPOSSIBLE[case]
    report = check_launch(
        Launch(str(SCRIPT), False, (*model_flags(**(BASE | overrides)),)), 2, None
    )
    found = [finding.text for finding in report.findings if finding.verdict is Severity.WRONG]
    assert len(found) == 1 and text in found[0], found


@pytest.mark.parametrize("case", POSSIBLE)
def test_sizes_that_train_are_right(case: str) -> None:
    words = model_flags(**(BASE | POSSIBLE[case]), pipeline_schedule="zb-h1")
    report = check_launch(Launch(str(SCRIPT), False, (*words,)), 2, None)
    assert report.is_right, report.findings


def test_experts_fit_on_more_ranks() -> None:
    overrides, _ = IMPOSSIBLE["experts on more ranks than there are"]
    with pytest.raises(ValueError, match="does not divide 6 ranks"):
        validate(overrides | {"global_batch_size": 12}, ranks=6)
    validate(overrides, ranks=8)
