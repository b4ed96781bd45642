"""The dimensions that costs are estimated from, as Megatron's arguments and config tell them."""

from __future__ import annotations

import pytest
from megatron.core.transformer import TransformerConfig
from megatron.training.training import num_floating_point_operations

from megatron_ext.adapter.dimensions import costs_of_model, dimensions_of
from megatron_ext.adapter.layers import symbols_of_layers
from megatron_ext.adapter.model_parts import ChunkSize
from megatron_ext.launch_check import line as launch_line
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.model.estimate import GPU, estimate
from megatron_ext.schedule.placement import line
from tests.helpers.megatron_runs import model_flags

GROUPED = {"group_query_attention": True, "num_query_groups": 2}


def key_value_width(**flags: object) -> int:
    """Of four heads, each 8 wide."""
    args = launch_line.parse(model_flags(num_attention_heads=4, **flags)).args
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2 if flags else None,
    )
    (width,) = {
        dimensions_of(settings, [4], 16, 1, 64).key_value_width for settings in (args, config)
    }
    return width


def test_each_head_has_keys_of_its_own_unless_they_are_grouped() -> None:
    """Without --group-query-attention the parser still says one group, and the keys and values of
    all heads but one were not counted."""
    assert key_value_width() == 32
    assert key_value_width(**GROUPED) == 16


DELTA_NET: dict[str, object] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
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


@pytest.mark.parametrize("symbol", "*-EGM")
def test_layers_of_hybrid_models_have_megatrons_operations(symbol: str) -> None:
    """Forward once, and twice backward; it counts the delta net's convolution too, which is none of
    a percent."""

    args = launch_line.parse(model_flags(**HYBRID)).args
    args.hybrid_layer_pattern = 3 * symbol
    args.padded_vocab_size = 64
    args.ffn_hidden_size = 2816
    costs = estimate(dimensions_of(args, [3], args.seq_length, 1, args.padded_vocab_size), GPU)
    ours = sum(map(sum, costs.seconds.values())) * GPU.operations
    assert ours == pytest.approx(num_floating_point_operations(args, 1), rel=0.01)


def test_context_parallel_ranks_share_the_operations_of_a_sample() -> None:
    """Attention looks at all of it: on 8 ranks seven eighths of its time were missing."""
    args = launch_line.parse(model_flags(**HYBRID, context_parallel_size=8)).args
    args.hybrid_layer_pattern = "***"
    args.padded_vocab_size = 64
    args.ffn_hidden_size = 2816
    model = dimensions_of(args, [3], args.seq_length // 8, 1, args.padded_vocab_size)
    ours = sum(map(sum, estimate(model, GPU).seconds.values())) * GPU.operations
    assert 8 * ours == pytest.approx(num_floating_point_operations(args, 1), rel=0.01)


def test_attention_that_is_linear_but_in_every_fourth_layer() -> None:
    """As in Qwen3-Next: a stage with two full ones takes longer."""
    flags = {**HYBRID, "num_layers": 8, "linear_attention_freq": 4}
    args = launch_line.parse(model_flags(**flags)).args
    assert symbols_of_layers(args) == []
    args.experimental_attention_variant = "gated_delta_net"
    args.moe_layer_freq = [0, *[1] * 7]
    assert symbols_of_layers(args) == ["G-", "GE", "GE", "*E", "GE", "GE", "GE", "*E"]
    args.ffn_hidden_size = 4096
    full, linear = (
        sum(figures[1] for figures in estimate(model, GPU).seconds.values())
        for model in (dimensions_of(args, layers, 2048, 1, 0) for layers in ([3, 1], [2, 1]))
    )
    assert full != linear


def test_layers_whose_work_is_not_known_have_equal_costs() -> None:
    config = TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=4)
    known, unknown = (
        costs_of_model(
            config,
            line(2),
            [ChunkSize("HybridModel", 2, 0, 1, 0, symbols) for symbols in ("*-", last)],
            16,
            1,
            is_told=False,
        )
        for last in ("--", "+-")
    )
    assert known.seconds[Kind.FORWARD][0] != known.seconds[Kind.FORWARD][1]
    assert set(map(max, unknown.seconds.values())) == set(map(min, unknown.seconds.values())) == {1}
