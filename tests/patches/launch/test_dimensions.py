"""Tests of model dimensions that are read from Megatron's arguments and config, for cost
estimates."""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.training.training import num_floating_point_operations

from megatron_ext.adapter.dimensions import execution, hidden_in_pairs
from megatron_ext.adapter.model_bytes import state_of
from megatron_ext.adapter.model_parts import ChunkSize
from megatron_ext.cost_model.assumptions import assumptions
from megatron_ext.cost_model.description import describe, layers_of
from megatron_ext.cost_model.execution import Execution, Precision
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.operations.attention import attended_tokens
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.placement import line
from scripts.evaluation.recipes.recipe import read_models
from tests.helpers.documents import DOCS, check_written, table
from tests.helpers.estimated import costs_of_arguments, costs_of_model
from tests.helpers.flops import flops_of
from tests.helpers.megatron_runs import model_flags

GROUPED = {"group_query_attention": True, "num_query_groups": 2}


def key_value_width(**flags: object) -> int:
    """Return the width of the keys of a model with four attention heads of width 8."""
    args = megatron_arguments.parse_arguments(model_flags(num_attention_heads=4, **flags)).args
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2 if flags else None,
    )
    (width,) = {describe(settings).key_value_width for settings in (args, config)}
    return width


def test_each_head_has_keys_of_its_own_unless_they_are_grouped() -> None:
    """Each attention head has its own keys and values unless --group-query-attention is set.
    Without that flag Megatron's parser still says one group, so the estimate used to count the keys
    and values of one head only."""
    assert key_value_width() == 32
    assert key_value_width(**GROUPED) == 16


def test_tensor_and_context_parallel_ranks_have_one_queue_wherever_they_are_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Estimates assume CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor and context parallelism on any
    machine, because Megatron requires the variable for them before Blackwell. It used to be assumed
    only on machines without a GPU, so two machines planned differently."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    args = megatron_arguments.parse_arguments(model_flags()).args

    def has_one_queue(tensor: int, context: int) -> bool:
        args.tensor_model_parallel_size, args.context_parallel_size = tensor, context
        return execution(args, 128, 1).has_one_queue

    assert [has_one_queue(*sizes) for sizes in ((1, 1), (2, 1), (1, 2))] == [False, True, True]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert has_one_queue(1, 1)


@pytest.mark.parametrize(
    ("settings", "stored", "gathered"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, 4.0, None),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True}, 2.0, 1.0),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}, 2.0625, None),
        ({"fp4": "e2m1", "fp4_param_gather": True}, 1.125, 0.5),
    ],
)
def test_matrices_are_gathered_as_megatron_does(
    settings: dict[str, Any], stored: float, gathered: float | None
) -> None:
    """Weights in FP8 are gathered by rows, a byte for each element, and weights in MXFP8 in 16
    bits. The estimate used to count all stored bytes as gathered, also the copy by columns, which
    each rank makes by itself."""
    args = megatron_arguments.parse_arguments(model_flags()).args
    of_validation = {"params_dtype": torch.bfloat16, "data_parallel_size": 2, "world_size": 4}
    vars(args).update(of_validation | settings)
    state = state_of(args)
    assert (state.matrix_bytes, state.gathered_matrix_bytes) == (stored, gathered)


@pytest.mark.parametrize(
    ("gpu", "dispatcher", "words"),
    [("h100", "alltoall", "a third"), ("h100", "flex", "half"), ("b200", "alltoall", "half")],
)
def test_the_assumed_share_is_said_in_words(
    gpu: str, dispatcher: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    args = megatron_arguments.parse_arguments(model_flags()).args
    args.moe_token_dispatcher_type, args.overlap_moe_expert_parallel_comm = dispatcher, True
    with megatron_arguments.on_gpus(args, GPUS[gpu].rates):
        said = assumptions(args, partial(hidden_in_pairs, args))
    assert said is not None and f"{words} of the time of experts' messages" in said


def test_a_frozen_language_model_has_no_weight_gradient_in_its_execution() -> None:
    args = megatron_arguments.parse_arguments(model_flags()).args
    assert not execution(args, 128, 1).is_frozen
    args.freeze_language_model = True
    assert execution(args, 128, 1).is_frozen


DELTA_NET: dict[str, object] = {
    "linear_conv_kernel_dim": 4,
    # Megatron's count assumes that heads of keys are as wide as those of values
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 32,
}
HYBRID: dict[str, object] = {
    **DELTA_NET,
    "num_layers": None,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "swiglu": True,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 512,
    "moe_shared_expert_intermediate_size": 256,
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
}


def counted(model: Model, run: Execution) -> float:
    """Return our count of the floating-point operations of a sample in F, I and W."""
    stage = Stage(model.layers, True, model.mtp_num_layers, True)
    return flops_of(model, stage, run)


@pytest.mark.parametrize("symbol", "*-EGM")
def test_layers_of_hybrid_models_have_megatrons_operations(symbol: str) -> None:
    """The estimate has as many operations as Megatron's count for each layer type of hybrid models,
    to 1 %. The backward pass has twice the operations of the forward pass. Megatron's count omits
    the router and Mamba's convolution."""
    args = megatron_arguments.parse_arguments(model_flags(**HYBRID)).args
    args.hybrid_layer_pattern = 3 * symbol
    args.padded_vocab_size = 64
    args.ffn_hidden_size = 2816
    ours = counted(describe(args), execution(args, args.seq_length, 1))
    assert ours == pytest.approx(num_floating_point_operations(args, 1), rel=0.01)


def test_context_parallel_ranks_share_the_operations_of_a_sample() -> None:
    """Each of 8 context-parallel ranks has an eighth of a sample's operations, because its tokens
    attend to the whole sample. The estimate used to omit seven eighths of attention's time."""
    args = megatron_arguments.parse_arguments(model_flags(**HYBRID, context_parallel_size=8)).args
    args.hybrid_layer_pattern = "***"
    args.padded_vocab_size = 64
    args.ffn_hidden_size = 2816
    ours = counted(describe(args), execution(args, args.seq_length, 1))
    assert 8 * ours == pytest.approx(num_floating_point_operations(args, 1), rel=0.01)


def test_attention_that_is_linear_but_in_every_fourth_layer() -> None:
    """A model like Qwen3-Next has full attention in every fourth layer and linear attention in the
    others, and the description tells these layers apart: a stage with two full layers takes
    longer."""
    flags = {**HYBRID, "num_layers": 8, "linear_attention_freq": 4}
    args = megatron_arguments.parse_arguments(model_flags(**flags)).args
    assert layers_of(args) == ("*E",) * 8
    args.experimental_attention_variant = "gated_delta_net"
    args.moe_layer_freq = [0, *[1] * 7]
    assert layers_of(args) == ("G-", "GE", "GE", "*E", "GE", "GE", "GE", "*E")
    args.ffn_hidden_size = 4096
    args.mtp_num_layers = 1
    assert describe(args).mtp_layer == "*E"


def of(**settings: Any) -> SimpleNamespace:
    sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
    return SimpleNamespace(**(sizes | settings))


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, ("*-",) * 4),
        ({"num_experts": 8, "moe_layer_freq": 2}, ("*E", "*-") * 2),
        ({"num_moe_experts": 8, "moe_layer_freq": [0, 1, 1, 1]}, ("*-", "*E", "*E", "*E")),
        ({"window_size": (128, 0)}, ("w-",) * 4),
        ({"window_size": (128, 0), "window_attn_skip_freq": 2}, ("w-", "*-") * 2),
        ({"window_size": [-1, 0]}, ("*-",) * 4),
        ({"hybrid_layer_pattern": "M*|-E/*-/*-"}, ("M", "*", "-", "E")),
    ],
)
def test_what_each_layer_is(settings: dict[str, Any], layers: tuple[str, ...]) -> None:
    """The type of each layer follows Megatron's frequencies: the frequency of attention windows
    counts layers from 1, and that of experts from 0."""
    assert layers_of(of(**settings)) == layers


def test_what_is_read_of_settings() -> None:
    """The model description reads settings under their alternative names, accepts that settings are
    absent, and names parts of a model that it does not know."""
    model = describe(of(num_moe_experts=8, ffn_hidden_size=96, gated_linear_unit=True))
    assert (model.num_experts, model.moe_ffn_hidden_size, model.num_query_groups) == (8, 96, 4)
    assert model.gated_linear_unit and not model.unknown
    hybrid = describe(of(hybrid_layer_pattern="M*/*E/*E", mamba_head_dim=8))
    assert (hybrid.mtp_num_layers, hybrid.mtp_layer, hybrid.mamba_num_heads) == (2, "*E", 8)
    odd = describe(of(hybrid_layer_pattern="D*", enable_hyper_connections=True))
    assert odd.unknown == ("hyper connections", "layers D of the pattern")
    run = execution(
        of(
            bf16=True,
            fp8="hybrid",
            tensor_model_parallel_size=2,
            recompute_granularity="selective",
            cp_comm_type=["a2a"],
        ),
        64,
        1,
    )
    assert run.precision is Precision.FP8 and run.element_bytes == 2
    assert run.recompute_modules == {"core_attn"} and run.expert_tensor_parallel == 2
    assert run.context_exchange == "a2a"


def test_layers_whose_work_is_not_known_have_equal_costs() -> None:
    config = TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=4)
    known, unknown = (
        costs_of_model(
            config,
            line(2),
            [ChunkSize("HybridModel", 2, 0, 1, 0, symbols) for symbols in ("*-", last)],
            16,
            1,
        )
        for last in ("--", "D-")
    )
    assert known.seconds[Kind.FORWARD][0] != known.seconds[Kind.FORWARD][1]
    assert set(map(max, unknown.seconds.values())) == set(map(min, unknown.seconds.values())) == {1}


def test_a_stage_has_the_costs_of_its_own_layers() -> None:
    """Each stage has the costs of its own layers: two dense layers take more than twice as long as
    two layers of experts here. The estimate used to count every layer of experts as a dense MLP,
    with the same cost on every stage."""
    flags = {**HYBRID, "num_layers": 4, "tensor_model_parallel_size": 1}
    args = megatron_arguments.parse_arguments(model_flags(**flags)).args
    args.moe_layer_freq = [0, 0, 1, 1]
    args.ffn_hidden_size, args.padded_vocab_size = 8192, 0
    dense, routed = costs_of_arguments(args, line(2)).seconds[Kind.FORWARD]
    assert dense > 2 * routed


# ---- operations of public models, compared with Megatron's own count

TOKENS = 4096
TOLD = 0.01  # share of a count, from which on the page names a difference
# Settings that Megatron's count reads and that a model's description may lack.
UNSET = {
    "moe_layer_freq": 1,
    "moe_router_topk": 0,
    "mamba_state_dim": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "ffn_hidden_size": 0,
    **dict.fromkeys(
        (
            *("num_experts", "mtp_num_layers", "moe_latent_size", "moe_ffn_hidden_size"),
            *("moe_shared_expert_intermediate_size", "experimental_attention_variant"),
            *("hybrid_layer_pattern", "attention_output_gate", "group_query_attention"),
            *("multi_latent_attention", "swiglu", "q_lora_rank", "linear_attention_freq"),
            *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
            *("linear_num_value_heads", "linear_conv_kernel_dim", "mamba_num_heads"),
        )
    ),
}
MODELS = read_models()


def differences(model: Model) -> dict[str, float]:
    """Return, by name, by how many floating-point operations of a token our count exceeds
    Megatron's. A number is negative if Megatron's count is the larger one."""
    hidden, depths = model.hidden_size, model.mtp_num_layers
    parts = "".join(model.layers) + depths * model.mtp_layer
    experts, latent = parts.count("E"), parts.count("*") * model.multi_latent_attention
    is_hybrid = len(model.layers[0]) == 1
    found = {
        "routers": 6 * hidden * model.num_experts * experts,
        "shared experts' gates": 6 * hidden * experts * model.moe_shared_expert_gate,
        "sliding windows": parts.count("w")
        * 12
        * model.query_width
        * (attended_tokens(TOKENS, model.window_size) - TOKENS / 2),
        "norms as products": -6
        * (
            latent * (model.q_lora_rank + model.kv_lora_rank)
            + depths * 3 * hidden * (not is_hybrid)
        ),
        "a depth's projection": 6 * 2 * hidden**2 * depths * is_hybrid,
    }
    if "M" in parts:
        convolved = model.mamba_num_heads * model.mamba_head_dim
        convolved += 2 * model.mamba_num_groups * model.mamba_state_dim
        found["Mamba's convolutions"] = parts.count("M") * 6 * 4 * convolved
    if depths and model.layers[-1][-1] == "E" and model.mtp_layer[-1] == "-":
        active = model.moe_router_topk * model.moe_ffn_hidden_size
        active += model.moe_shared_expert_intermediate_size
        found["depths' MLPs, which are dense"] = (
            18 * hidden * depths * (model.ffn_hidden_size - active)
        )
    # Megatron's count continues the pattern of layers over the prediction depths; the model's
    # prediction layer does not
    if "G" in parts and depths:
        one = Stage(("*",)), Stage(("G",))
        full, linear = (flops_of(model, stage, Execution(TOKENS)) / TOKENS for stage in one)
        found["a depth's attention, which is full"] = depths * (full - linear)
    return {what: figure for what, figure in found.items() if figure}


@cache
def compared(name: str) -> tuple[float, float, dict[str, float]]:
    """Return the floating-point operations of a token by Megatron's count, the same by our count,
    and the named differences between the two."""
    settings = SimpleNamespace(**(UNSET | dict(MODELS[name]) | {"seq_length": TOKENS}))
    model = describe(settings)
    settings.mtp_num_layers = model.mtp_num_layers
    theirs = num_floating_point_operations(settings, 1) / TOKENS
    return theirs, counted(model, Execution(TOKENS)) / TOKENS, differences(model)


@pytest.mark.parametrize("name", MODELS)
def test_operations_of_public_models_are_megatrons_but_for_what_it_leaves_out(name: str) -> None:
    theirs, ours, named = compared(name)
    assert ours == pytest.approx(theirs + sum(named.values()), rel=1e-5)


def test_the_page_has_what_megatrons_count_leaves_out() -> None:
    rows = []
    for name in MODELS:
        theirs, ours, named = compared(name)
        shares = {what: figure / theirs for what, figure in named.items()}
        largest = sorted(shares, key=lambda what: -abs(shares[what]))
        words = [f"{what} {shares[what]:+.2%}" for what in largest if abs(shares[what]) >= 5e-5]
        difference = f"{ours / theirs - 1:+.2%}" if words else "0"
        if abs(ours / theirs - 1) >= TOLD:
            rows.append([name, f"{theirs / 1e9:.1f}", difference, ", ".join(words)])
    page = "../scripts/benchmarks/results.md"
    assert f"The {len(MODELS) - len(rows)} others" in (DOCS / page).read_text()
    head = ["model", "Megatron's count, 1e9", "ours", "of it"]
    check_written("operations", table(head, rows), page)
