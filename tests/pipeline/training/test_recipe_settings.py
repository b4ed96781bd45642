"""Tests of settings of public recipes that must not depend on the schedule, each compared with
stock.

The settings concern what a layer computes, how tokens find their experts, what is recomputed, and
how layers are split. Weights are drawn by their names, so that a model has the same initial
weights under any placement. Losses, parameters and optimizer tensors are stock's to the last bit.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.language_module import language_module
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.moe import moe_utils
from megatron.training import get_args
from megatron.training.argument_utils import core_transformer_config_from_args

from scripts.pretrain_gpt import model_provider
from tests.helpers.callers import draw_by_name, named_parameters
from tests.helpers.combinations import at_night, nightly
from tests.helpers.covers.marks import covers
from tests.helpers.drawn_models import say_there_is_no_fp8
from tests.helpers.latent_attention import take_local_attention
from tests.helpers.megatron_runs import (
    Run,
    assert_same,
    losses,
    model_flags,
    train,
    train_or_fail,
)

Flags = dict[str, Any]

BAD_GRADIENTS = Path(__file__).parents[1] / "scripts" / "pretrain_gpt_with_bad_gradients.py"

MLA: Flags = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "kv_channels": 16,
    "qk_layernorm": True,
    "no_rope_fusion": True,
}
EXPERTS: Flags = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 1e-2,
    "disable_bias_linear": True,
}
UNTIED: Flags = {"untie_embeddings_and_output_weights": True}
SELECTIVE: Flags = {"recompute_granularity": "selective"}
# For each setting: the number of ranks, and flags of the training.
SETTINGS: dict[str, tuple[int, Flags]] = {
    "multi-latent attention": (
        2,
        {
            **MLA,
            **SELECTIVE,
            "recompute_modules": ["mla_up_proj", "mlp"],
            "disable_bias_linear": True,  # with a bias, stock's recompute of mlp never ends
        },
    ),
    "norms and cores recomputed": (
        2,
        {**SELECTIVE, "recompute_modules": ["layernorm", "core_attn"]},
    ),
    "multi-latent attention, experts, multi-token prediction, bf16": (
        2,
        {**MLA, **EXPERTS, "mtp_num_layers": 1, "bf16": True},
    ),
    "windows, sinks, an output gate": (
        2,
        {
            "window_size": "4,0",
            "window_attn_skip_freq": 2,
            "softmax_type": "learnable",
            "no_masked_softmax_fusion": True,
            "group_query_attention": True,
            "num_query_groups": 1,
            "attention_output_gate": True,
        },
    ),
    "experts in groups, dense layers, a gated shared one, recomputed": (
        2,
        {
            **EXPERTS,
            **SELECTIVE,
            "recompute_modules": ["moe"],
            "moe_router_dtype": "fp32",
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_pre_softmax": True,
            "moe_layer_freq": "([0]*1+[1]*5)",
            "moe_shared_expert_intermediate_size": 32,
            "moe_shared_expert_gate": True,
        },
    ),
    "shared experts recomputed": (
        2,
        {
            **EXPERTS,
            **SELECTIVE,
            "recompute_modules": ["shared_experts"],
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "experts of some capacity": (
        2,
        {**EXPERTS, "moe_expert_capacity_factor": 1.1},
    ),
    "whole experts beside tensor parallel": (
        4,
        {
            **EXPERTS,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "fused cross entropy, loss per token": (
        2,
        {
            "cross_entropy_loss_fusion": True,
            "cross_entropy_fusion_impl": "native",
            "calculate_per_token_loss": True,
            "bf16": True,
        },
    ),
    "full recompute": (
        2,
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "bf16": True,
        },
    ),
    "full recompute of some layers": (
        2,
        {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 1,
        },
    ),
}
SCHEDULES = ("zb-h1", "interleaved-zb", "zb-v")
DAY = {("multi-latent attention", "zb-v")}


def case(setting: str, schedule: str) -> Any:
    has_stand_in = setting.startswith(("multi-latent", "norms"))
    grade = "B" if has_stand_in else "A"
    settings = {**UNTIED, **SETTINGS[setting][1]}
    return pytest.param(setting, schedule, marks=covers(grade, (schedule,), settings))


CASES = [
    case(setting, schedule)
    for setting in SETTINGS
    for schedule in SCHEDULES
    if (setting, schedule) in DAY or at_night((setting, schedule))
]


def drawn_by_name(*args: Any, **kwargs: Any) -> Any:
    take_local_attention()
    say_there_is_no_fp8()
    model = model_provider(*args, **kwargs)
    draw_by_name(
        (name, parameter)
        for name, parameter in named_parameters(model)
        if parameter.dim() > 1 or "softmax_offset" in name
    )
    return model


def flags(**more: Any) -> list[str]:
    modules = more.pop("recompute_modules", None)
    words = model_flags(
        **{
            "pipeline_model_parallel_size": 2,
            "num_layers": 6,
            "position_embedding_type": "rope",
            "train_iters": 3,
            **UNTIED,
            **more,
        }
    )
    return words + (["--recompute-modules", *modules] if modules else [])


@functools.cache
def stock(setting: str) -> list[Run]:
    ranks, more = SETTINGS[setting]
    return train(ranks, flags(**more), model_provider=drawn_by_name)


@pytest.mark.parametrize(("setting", "schedule"), CASES)
def test_it_is_stock_to_the_last_bit(setting: str, schedule: str) -> None:
    ranks, more = SETTINGS[setting]
    if schedule != "zb-h1":
        more = {
            **more,
            "pipeline_model_parallel_layout": "Ett|tt|t|t{}L".format(
                "m" * more.get("mtp_num_layers", 0)
            ),
        }
    ours = flags(**more, pipeline_schedule=schedule)
    runs = train(ranks, ours, model_provider=drawn_by_name)
    assert len(losses(runs)) == 3
    assert {run.schedule for run in runs} == {"PipelineStep"}
    assert_same(runs, stock(setting))


# --- the numbers of layers of the first and the last stage

ENDS: Flags = {"decoder_first_pipeline_num_layers": 6, "decoder_last_pipeline_num_layers": 2}


@nightly("test_placements.py has them on a V")
@pytest.mark.parametrize(
    ("schedule", "ends"),
    [
        pytest.param(schedule, ends, marks=covers("A", (schedule,), UNTIED | ends))
        for schedule in ("zb-h1", "interleaved-zb")
        for ends in ({name: layers} for name, layers in ENDS.items())
    ],
)
def test_layers_of_the_ends(schedule: str, ends: Flags) -> None:
    """Trainings with a given number of layers on the first or last rank equal stock's, and the
    stages really have these layers. A loop splits them over the chunks of that rank. An older test
    could not fail: it gave the first stage half of the layers, which it has without the setting
    too."""
    more: Flags = {"num_layers": 8, **ends}
    reference = train(2, flags(**more), model_provider=drawn_by_name)
    runs = train(2, flags(**more, pipeline_schedule=schedule), model_provider=drawn_by_name)
    assert [sum(map(len, run.layers)) for run in runs] == [6, 2]
    assert_same(runs, reference)


# --- an embedding or output layer that counts as a layer when layers are split

ACCOUNTED: dict[str, dict[str, list[list[list[int]]]]] = {
    "account_for_embedding_in_pipeline_split": {
        "zb-h1": [[[0, 1, 2]], [[3, 4, 5, 6]]],
        "interleaved-zb": [[[0], [3, 4]], [[1, 2], [5, 6]]],
    },
    "account_for_loss_in_pipeline_split": {
        "zb-h1": [[[0, 1, 2, 3]], [[4, 5, 6]]],
        "interleaved-zb": [[[0, 1], [4, 5]], [[2, 3], [6]]],
    },
}


@nightly("test_placements.py has them on a V")
@pytest.mark.parametrize(
    ("setting", "schedule"),
    [
        pytest.param(setting, schedule, marks=covers("A", (schedule,), UNTIED | {setting: True}))
        for setting, schedules in ACCOUNTED.items()
        for schedule in schedules
    ],
)
def test_an_end_that_counts_as_a_layer(setting: str, schedule: str) -> None:
    """Trainings equal stock's if the embedding or the output layer counts as a layer of its stage,
    and the stages really change. An older test could not fail: it counted both as layers on two
    ranks, which leaves the stages of a linear placement as they are."""
    more: Flags = {"num_layers": 7, setting: True}
    chunks = None if schedule == "zb-h1" else 2
    reference = train(
        2, flags(**more, num_virtual_stages_per_pipeline_rank=chunks), model_provider=drawn_by_name
    )
    runs = train(2, flags(**more, pipeline_schedule=schedule), model_provider=drawn_by_name)
    assert [run.layers for run in runs] == ACCOUNTED[setting][schedule]
    assert [run.layers for run in reference] == ACCOUNTED[setting][schedule]
    assert_same(runs, reference)


# --- gradients that are NaN


@nightly("a message of Megatron's own check, which `overlap_grad_reduce` does not change by day")
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(schedule, marks=covers("A", (schedule,), UNTIED))
        for schedule in ("zb-h1", "interleaved-zb", "zb-v")
    ],
)
def test_a_gradient_that_is_no_number_ends_the_training(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN gradient ends the training under our schedules. Megatron checks gradients when it
    reduces them, and no earlier test had a gradient that fails the check."""
    monkeypatch.setenv("BAD_GRADIENTS", json.dumps({2: float("nan")}))
    words = flags(num_layers=8, pipeline_schedule=schedule, rerun_mode="disabled")
    results = train_or_fail(2, words, BAD_GRADIENTS)
    assert all(result.exit_code for result in results)
    assert any("found NaN in local grad norm" in result.error for result in results)


# --- experts with random routing, as benchmarks use it

BALANCED: Flags = {**EXPERTS, "moe_router_force_load_balancing": True}


@nightly("test_placements.py has dropout, which draws alike")
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        pytest.param(schedule, chunks, marks=covers("A", (schedule,), UNTIED | BALANCED))
        for schedule, chunks in (("zb-h1", None), ("interleaved-zb", 2))
    ],
)
def test_routing_at_random_is_stocks(schedule: str, chunks: int | None) -> None:
    """Random routing of experts equals stock's under linear and loop placements. A rank draws in
    the order of its forward passes, which these placements share with stock. A V has its stages on
    other ranks, so it draws other numbers."""
    more: Flags = {**BALANCED, "num_layers": 8}
    reference = train(
        2, flags(**more, num_virtual_stages_per_pipeline_rank=chunks), model_provider=drawn_by_name
    )
    runs = train(2, flags(**more, pipeline_schedule=schedule), model_provider=drawn_by_name)
    assert_same(runs, reference)
    unforced = {**more, "moe_router_force_load_balancing": None}
    assert losses(train(2, flags(**unforced), model_provider=drawn_by_name)) != losses(runs)


def routed_by_content(*args: Any, **kwargs: Any) -> Any:
    """Build a model whose random routing depends only on a layer's values, so that any rank draws
    the same at any time."""

    def draw(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator()
        generator.manual_seed(hash(logits.double().sum().item()) % 2**32)
        return torch.randn(logits.shape, generator=generator, dtype=logits.dtype)

    moe_utils.RandomSTE.forward = staticmethod(draw)
    return drawn_by_name(*args, **kwargs)


@nightly("test_routing_at_random_is_stocks, but for the stages' places")
@covers("B", ("zb-v",), UNTIED | BALANCED)[0]
def test_routing_at_random_on_a_v() -> None:
    more: Flags = {**BALANCED, "num_layers": 8}
    reference = train(2, flags(**more), model_provider=routed_by_content)
    runs = train(2, flags(**more, pipeline_schedule="zb-v"), model_provider=routed_by_content)
    assert_same(runs, reference)
    unforced = {**more, "moe_router_force_load_balancing": None}
    assert losses(train(2, flags(**unforced), model_provider=routed_by_content)) != losses(runs)


# --- Transformer Engine's cross entropy, with a stand-in for its kernel


def with_its_cross_entropy(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Build a model with Transformer Engine's cross entropy. Megatron's arguments refuse this
    setting, while the model's config only warns of it."""
    config = config or core_transformer_config_from_args(get_args())
    config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl = True, "te"
    language_module.te_parallel_cross_entropy = cross_entropy
    return drawn_by_name(pre_process, post_process, vp_stage, config, pg_collection)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, *settings: Any) -> torch.Tensor:
    """Return 1.25 times Megatron's cross entropy, so that a test sees which of the two functions
    ran."""
    return 1.25 * vocab_parallel_cross_entropy(logits.float(), labels)


TE_LOSS: Flags = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}


@nightly("the loss of a layer's stage is Megatron's own, and test_parity.py has that")
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(schedule, marks=covers("B", (schedule,), UNTIED | TE_LOSS))
        for schedule in SCHEDULES
    ],
)
def test_its_cross_entropy(schedule: str) -> None:
    reference = train(2, flags(num_layers=8), model_provider=with_its_cross_entropy)
    ours = flags(num_layers=8, pipeline_schedule=schedule)
    assert_same(train(2, ours, model_provider=with_its_cross_entropy), reference)
    assert losses(reference) != losses(train(2, ours, model_provider=drawn_by_name))
