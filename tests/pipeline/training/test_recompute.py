"""Tests of recomputed passes (``--pipeline-recompute``): the numbers are stock Megatron's.

Weights are drawn by their names, so that a model has the same initial weights under any placement.
Every stage recomputes every microbatch, the last stage too. Compared are losses, those of
multi-token prediction and of experts, parameters and optimizer tensors. A router's counts of tokens
are compared through its biases, which depend on them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_ext.compile.registry import choose
from tests.helpers.combinations import at_night, nightly
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import EXPERTS, assert_same
from tests.helpers.short_search import shorten_search
from tests.helpers.trainings import Training

Flags = dict[str, object]

DROPOUT: Flags = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
TIED: Flags = {"untie_embeddings_and_output_weights": None}
# Three of eight experts are chosen, so that the sum of their scores has an order. All losses and
# counts of experts are switched on.
ROUTED: Flags = EXPERTS | {
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_z_loss_coeff": 1e-3,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-2,
}
MODELS: dict[str, tuple[int, Flags]] = {
    "dropout": (2, DROPOUT),
    "PP 4, dropout": (4, {"pipeline_model_parallel_size": 4} | DROPOUT),
    "bf16": (2, {"bf16": True}),
    "experts, dropout": (2, ROUTED | DROPOUT),
    "EP 2, experts": (4, ROUTED | {"expert_model_parallel_size": 2}),
    "multi-token prediction, tied": (2, TIED | {"mtp_num_layers": 2}),
    "multi-token prediction, experts": (2, ROUTED | {"mtp_num_layers": 1}),
    "TP 2, sequence parallel": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True} | DROPOUT,
    ),
    "distributed optimizer": (
        4,
        {
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
    "selective recompute": (2, {"recompute_granularity": "selective"} | DROPOUT),
    "selective recompute of experts": (
        2,
        ROUTED | {"recompute_granularity": "selective", "recompute_modules": "moe"},
    ),
    "loss per token": (2, {"calculate_per_token_loss": True, "swiglu": True}),
}
CASES = [
    *at_night(*((model, schedule) for model in MODELS for schedule in ("zb-h1", "zb-v"))),
    *at_night(("dropout", "1f1b"), ("dropout", "interleaved-zb"), ("EP 2, experts", "hanayo")),
]


def training(model: str) -> Training:
    ranks, flags = MODELS[model]
    given: Flags = {
        "pipeline_model_parallel_size": 2,
        "num_layers": 8,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "train_iters": 3,
        **flags,
    }
    return Training(ranks, given, build=drawn_by_name)


def of_experts(output: str) -> list[str]:
    """Return the losses of experts that Megatron has logged, by iteration."""
    return re.findall(r"((?:load_balancing|z)_loss: \S+)", output)


@pytest.mark.parametrize(
    ("model", "schedule"),
    CASES,
)
def test_it_is_stock_to_the_last_bit(
    model: str, schedule: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A training in which every pass is recomputed equals stock to the last bit. On a V, which
    draws dropout on other ranks than stock, the reference is the same schedule without
    recompute."""
    draws = "attention_dropout" in MODELS[model][1] and schedule not in ("1f1b", "zb-h1")
    expected = training(model).run(pipeline_schedule=schedule if draws else None)
    said = of_experts(capfd.readouterr().out)
    ranks = int(str(MODELS[model][1].get("pipeline_model_parallel_size", 2)))
    stages = choose(schedule).place(ranks).stages
    ours: Flags = {"pipeline_schedule": schedule, "pipeline_recompute": f"first:{stages}"}
    runs = training(model).run(**ours)
    assert {run.schedule for run in runs} == {"PipelineStep"}
    assert_same(runs, expected)
    assert of_experts(capfd.readouterr().out) == said
    assert bool(said) == ("num_experts" in MODELS[model][1])


@nightly("test_placements.py has a V with it")
@pytest.mark.parametrize(
    "more",
    [
        {"pipeline_vocab_parallel": 1},
        {"pipeline_vocab_parallel": 2},
        {"pipeline_p2p": "batched"},
        {"pipeline_memory_limit": "0.8x", "pipeline_recompute": "fit"},
    ],
    ids=str,
)
def test_recompute_with_another_setting_of_ours(more: Flags) -> None:
    """Recompute combined with another setting of ours (offload, a split vocabulary, batched
    messages, a memory limit) trains as the same schedule without recompute."""
    beside = {name: value for name, value in more.items() if name != "pipeline_recompute"}
    if "pipeline_recompute" in more:
        beside.pop("pipeline_memory_limit")
    with_it: Flags = {"pipeline_recompute": "first:4", **more}
    without = training("bf16").but(pipeline_schedule="zb-v", **beside)
    training("bf16").start_as(without, pipeline_schedule="zb-v", **with_it)


@nightly("test_placements.py has the setting")
def test_a_search_says_what_is_recomputed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The log says how many of the activations v-auto recomputes with `--pipeline-recompute fit`.
    The search recomputes some microbatches of some stages, where the schedule has time."""
    shorten_search(monkeypatch)
    ours: Flags = {"pipeline_memory_limit": 1.2, "pipeline_recompute": "fit"}
    training("bf16").start_as_stock(pipeline_schedule="v-auto", **ours)
    assert "of the activations are recomputed" in capfd.readouterr().out


@nightly("test_placements.py has the setting")
def test_a_file_with_recomputed_passes(tmp_path: Path) -> None:
    table = tmp_path / "again.csv"
    table.write_text(
        "0F0,0F1,0R0,0I0,0W0,0F2,0R1,0I1,0W1,0F3,0I2,0W2,0R3,0I3,0W3\n"
        "1F0,1I0,1F1,1W0,1R1,1I1,1W1,1F2,1I2,1W2,1F3,1I3,1W3\n"
    )
    training("dropout").but(global_batch_size=4).start_as_stock(pipeline_schedule=table)
