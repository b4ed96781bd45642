"""The dimensions that costs are estimated from, as Megatron's arguments and config tell them."""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig

from megatron_ext.adapter.dimensions import dimensions_of
from megatron_ext.launch_check import line as launch_line
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
