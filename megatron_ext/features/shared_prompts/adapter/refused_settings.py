"""Settings of Megatron that do not go with prompts that answers share.

A row with shared prompts is neither a sequence nor a pack. Whatever takes it for one of them would
train on wrong numbers without an error, so it is refused with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.adapter.handled_settings.refused_setting import RefusedSetting
from megatron_ext.features.shared_prompts.settings import SharedPrompts

_FLAG = "--pipeline-shared-prompts"
_LOSSES = (
    f"it counts a shared prompt once, and not once for each answer: write {_FLAG} losses-once if "
    f"that is meant, or"
)


def _has_experts(settings: Any) -> bool:
    return any(getattr(settings, name, None) for name in ("num_experts", "num_moe_experts"))


def _balances(settings: Any) -> bool:
    coefficients = getattr(settings, "moe_aux_loss_coeff", 0)
    given = coefficients if isinstance(coefficients, list) else [coefficients]
    return _has_experts(settings) and any(given)


def _looks_at_all_tokens(balancing: Any) -> bool:
    kinds = balancing if isinstance(balancing, list) else [balancing]
    return not {"sinkhorn", "quantile_balancing"}.isdisjoint(kinds)


REFUSED = (
    RefusedSetting(
        "context_parallel_size",
        lambda value: value > 1,
        "a row is not split over ranks: write --context-parallel-size 1",
    ),
    RefusedSetting(
        "mtp_num_layers",
        bool,
        "multi-token prediction shifts tokens within documents, and a row's are no documents: drop "
        "--mtp-num-layers",
    ),
    *(
        RefusedSetting(
            name,
            bool,
            "a hybrid model carries a state over the answers of a row: take a GPT model",
        )
        for name in ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model")
    ),
    RefusedSetting(
        "experimental_attention_variant",
        bool,
        "its attention does not know prompts: drop --experimental-attention-variant",
    ),
    RefusedSetting(
        "cuda_graph_impl",
        lambda value: value != "none",
        "a graph has one shape, and rows differ: write --cuda-graph-impl none",
    ),
    *(
        RefusedSetting(name, bool, f"attention of prompts is untried in FP8: drop {flag}")
        for name, flag in (
            ("fp8_dot_product_attention", "--fp8-dot-product-attention"),
            ("fp8_multi_head_attention", "--fp8-multi-head-attention"),
        )
    ),
    *(
        RefusedSetting(
            name, bool, f"keys that the backward pass gathers again must stay: drop {flag}"
        )
        for name, flag in (
            ("fine_grained_activation_offloading", "--fine-grained-activation-offloading"),
            ("cpu_offloading", "--cpu-offloading-num-layers"),
        )
    ),
    RefusedSetting(
        "overlap_moe_expert_parallel_comm",
        bool,
        "plans of pairs do not have the ends of sequences: drop --overlap-moe-expert-parallel-comm",
    ),
    RefusedSetting(
        "moe_expert_capacity_factor",
        bool,
        "other tokens would be dropped than in sequences apart: drop --moe-expert-capacity-factor",
        matters=_has_experts,
    ),
)
# Losses that are refused unless --pipeline-shared-prompts losses-once permits them to count a
# prompt once.
REFUSED_LOSSES = (
    RefusedSetting(
        "moe_router_load_balancing_type",
        lambda balancing: balancing != "none",
        f"{_LOSSES} --moe-router-load-balancing-type none",
        matters=_balances,
    ),
    RefusedSetting(
        "moe_router_load_balancing_type",
        _looks_at_all_tokens,
        f"{_LOSSES} --moe-router-load-balancing-type none",
        matters=_has_experts,
    ),
    RefusedSetting(
        "moe_z_loss_coeff", bool, f"{_LOSSES} drop --moe-z-loss-coeff", matters=_has_experts
    ),
    RefusedSetting(
        "moe_router_enable_expert_bias",
        bool,
        f"{_LOSSES} drop --moe-router-enable-expert-bias",
        matters=_has_experts,
    ),
)


def refuse_settings(settings: Any, mode: SharedPrompts) -> None:
    """Raise ValueError for the first setting of Megatron that conflicts with shared prompts.

    ``settings`` are Megatron's arguments or a TransformerConfig; ``mode`` is the value of
    --pipeline-shared-prompts.
    """
    refused = REFUSED if mode is SharedPrompts.LOSSES_ONCE else (*REFUSED, *REFUSED_LOSSES)
    for refusal in refused:
        value = getattr(settings, refusal.setting, None)
        unsupported: Callable[[Any], bool] = refusal.unsupported
        if value is not None and refusal.matters(settings) and unsupported(value):
            raise ValueError(
                f"{_FLAG} {mode} does not go with {refusal.setting}={value}: {refusal.remedy}"
            )
