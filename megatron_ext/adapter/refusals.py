"""Settings of Megatron that our schedules and settings refuse: the setting, the reason, and what to
write instead. `REFUSALS` groups them by feature; checks, pages, records and tests iterate over it.

The default is to refuse: only combinations that have been made to work are allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import megatron.core

from megatron_ext.adapter import document_masks
from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals
from megatron_ext.adapter.handled_settings.refused_setting import (
    RefusalGroup,
    RefusedSetting,
    by_option,
    by_schedule,
    drop,
    only_torch_dist,
)
from megatron_ext.adapter.pairs.overlap_setting import FLAG, with_requested_pairs
from megatron_ext.adapter.transformer_engine import installed
from megatron_ext.adapter.transformer_engine.captured import GRAPHS, IMPLEMENTATION, captures
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.config import flag, flag_with_value
from megatron_ext.features.offload.refusals import OFFLOAD_REFUSALS
from megatron_ext.features.post_validation.refusals import POST_VALIDATION_REFUSALS
from megatron_ext.features.vocabulary.refusals import VOCABULARY_REFUSALS
from megatron_ext.runtime.messages.peers import are_rehearsed
from megatron_ext.schedule.problem import Recompute, ScheduleOptions
from megatron_ext.schedule.slices import Slices

_splits: Callable[[ResolvedSpec], bool] = attrgetter("traits.splits_backward")
_moves_first_stage: Callable[[ResolvedSpec], bool] = attrgetter("moves_first_stage")


def _moves_stages(resolved: ResolvedSpec) -> bool:
    return not resolved.example.in_turn


def _has_one_stage(resolved: ResolvedSpec) -> bool:
    return resolved.example.chunks == 1


def _has_several_stages(resolved: ResolvedSpec) -> bool:
    return not _has_one_stage(resolved)


SCHEDULE_REFUSALS = (
    RefusedSetting(
        "transformer_impl",
        lambda value: (
            value != "local" and not (value == "transformer_engine" and installed.can_split())
        ),
        "its backward is not split: write --transformer-impl local, use 1f1b or gpipe, or install "
        "Transformer Engine 2.8 or later",
        by=_splits,
    ),
    drop(
        "use_transformer_engine_op_fuser",
        "its linear operations compute both gradients in one call, as read in Transformer Engine "
        "2.8.0 and 2.20.2, where at most grouped experts can defer weight gradients",
        by=_splits,
    ),
    RefusedSetting(
        "gtp_weight_remat_size",
        lambda value: value > 1,
        "drop --tensor-parallel-num-weight-shards",
        by=_splits,
    ),
    *(
        drop(name, "the experts' weight gradients are deferred weight by weight", by=_splits)
        for name in ("moe_single_grouped_weight", "moe_single_grouped_bias")
    ),
    drop(
        "use_grouped_gemm_for_shared_expert",
        "its operations are Transformer Engine's fused ones, whose weight gradients cannot be "
        "deferred",
        by=_splits,
    ),
    RefusedSetting(
        "overlap_moe_expert_parallel_comm",
        bool,
        "with one stage on a rank no forward pass can overlap a backward pass: choose "
        "interleaved, interleaved-zb, zb-v or dualpipe-v, or drop "
        "--overlap-moe-expert-parallel-comm",
        by=_has_one_stage,
    ),
    drop("hybrid_context_parallel"),
    drop("moe_paged_stash"),
    *(
        RefusedSetting(
            "cuda_graph_impl",
            lambda value, impl=impl: value == impl,  # type: ignore[misc]
            f"write --cuda-graph-impl transformer_engine, or none: {why}",
        )
        for impl, why in (
            (
                "local",
                "its graphs are made at the end of Megatron's own step, of the passes that it ran",
            ),
            (
                "full_iteration",
                "graphs of whole iterations have run on no GPU, only in an emulation on the CPU",
            ),
        )
    ),
    drop("num_microbatches_with_partial_activation_checkpoints"),
    RefusedSetting(
        "overlap_p2p_comm_warmup_flush",
        bool,
        "drop --overlap-p2p-communication-warmup-flush: receives are posted in time anyway",
    ),
    RefusedSetting(
        "fake_process_group",
        bool,
        "a rank alone receives nothing: drop --fake-process-group, and write megatron-ext rehearse "
        "-- before the launch command, which runs one rank at a time with made-up peers",
        matters=lambda settings: not are_rehearsed(),
    ),
    drop("use_ring_exchange_p2p"),
    drop("use_megatron_fsdp"),
    drop("use_torch_fsdp2"),
    only_torch_dist("a rank's stages are others than stock's", by=_moves_stages),
    RefusedSetting(
        "perform_rl_step",
        bool,
        "reinforcement learning takes a rank's first stage for its whole model: choose a schedule "
        "with one stage on each rank, such as zb-h1",
        by=_has_several_stages,
    ),
    RefusedSetting(
        "moe_use_upcycling",
        bool,
        "Megatron cannot upcycle ranks that hold several stages: upcycle with a schedule that has "
        "one stage on each rank, such as zb-h1, and load what that saves",
        by=_has_several_stages,
    ),
    RefusedSetting(
        "moe_enable_routing_replay",
        bool,
        "verl and others sort the recorded routes of a rank's stages by the order of Megatron's "
        "interleaved schedule: drop --moe-enable-routing-replay (verl's router_replay.mode), or "
        "choose a schedule with one stage on each rank, such as zb-h1",
        by=_has_several_stages,
    ),
    RefusedSetting(
        "reset_attention_mask",
        bool,
        f"{document_masks.WHY}, and tokens would attend to other documents on the stages between: "
        f"{document_masks.REMEDY}, or choose a schedule with one stage on each of two pipeline "
        f"ranks, such as zb-h1",
        by=_has_several_stages,
        matters=document_masks.masks_are_applied,
    ),
    *(
        [
            drop(
                "dataloader_save",
                "Megatron 0.18 would save it as that of another pipeline rank than the one whose "
                "state is loaded",
                by=_moves_first_stage,
            )
        ]
        if megatron.core.__version__.startswith("0.18")
        else []
    ),
    drop("init_model_with_meta_device", by=_moves_first_stage),
    RefusedSetting("yaml_cfg", bool, "give Megatron's settings as flags, not by --yaml-cfg"),
)

_WITHOUT_GRAPHS = "write --cuda-graph-impl none"

GRAPH_REFUSALS = (
    RefusedSetting(
        "cuda_graph_warmup_steps",
        lambda value: value < 1,
        "write --cuda-graph-warmup-steps 1 or more: the order of a step is captured after one",
    ),
    *(
        RefusedSetting(
            name, bool, f"as many microbatches as are captured must come in every step: {then}"
        )
        for name, then in (
            ("rampup_batch_size", "drop --rampup-batch-size"),
            ("step_batch_size_schedule", "drop --step-batch-size-schedule"),
        )
    ),
    RefusedSetting(
        "variable_seq_lengths",
        bool,
        f"a graph has one shape: give all microbatches one sequence length, or {_WITHOUT_GRAPHS}",
    ),
)

_WITHOUT_PAIRS = "drop --overlap-moe-expert-parallel-comm"

PAIRS_REFUSALS = (
    RefusedSetting(
        "cuda_graph_impl",
        lambda value: value == "transformer_engine",
        f"graphs are captured in the order of whole passes, and these are interwoven: write "
        f"--cuda-graph-impl none, or {_WITHOUT_PAIRS}",
    ),
    *(
        RefusedSetting(
            name,
            bool,
            f"Megatron makes its plans without the ends of packed sequences, and tokens would see "
            f"those of others: {_WITHOUT_PAIRS}",
        )
        for name in ("sft", "dataloader_inter_document_masking")
    ),
    *(
        RefusedSetting(name, bool, f"plans of hybrid models are untried: {_WITHOUT_PAIRS}")
        for name in ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model")
    ),
    RefusedSetting(
        "fine_grained_activation_offloading",
        bool,
        f"its copies among interwoven passes are untried: drop "
        f"--fine-grained-activation-offloading, or {_WITHOUT_PAIRS}",
    ),
    RefusedSetting(
        "cpu_offloading",
        bool,
        f"its copies among interwoven passes are untried: drop --cpu-offloading-num-layers, or "
        f"{_WITHOUT_PAIRS}",
    ),
)

_WITHOUT_SLICES = "drop --pipeline-slices"


def _has_experts(settings: Any) -> bool:
    return any(getattr(settings, name, None) for name in ("num_experts", "num_moe_experts"))


def _shares_sequences(settings: Any) -> bool:
    ranks: int = getattr(settings, "context_parallel_size", 1)
    return ranks > 1


def _is_sparse(settings: Any) -> bool:
    return getattr(settings, "experimental_attention_variant", None) == "dsa"


def _is_several(value: Any) -> bool:
    return (value or 1) > 1


def _packs_sequences(settings: Any) -> bool:
    flags = ("sft", "dataloader_inter_document_masking")
    return any(getattr(settings, name, False) for name in flags)


def _balances_otherwise(balancing: Any) -> bool:
    kinds = balancing if isinstance(balancing, list) else [balancing]
    return not {"aux_loss", "seq_aux_loss", "none"}.issuperset(kinds)


SLICES_REFUSALS = (
    RefusedSetting(
        "moe_router_load_balancing_type",
        _balances_otherwise,
        f"it looks at more or less than a microbatch: write aux_loss, seq_aux_loss or none, or "
        f"{_WITHOUT_SLICES}",
        matters=_has_experts,
    ),
    RefusedSetting(
        "moe_expert_capacity_factor",
        bool,
        f"experts would drop tokens slice by slice: drop --moe-expert-capacity-factor, or "
        f"{_WITHOUT_SLICES}",
        matters=_has_experts,
    ),
    drop("moe_enable_routing_replay", "a replay is of whole microbatches"),
    RefusedSetting(
        "mtp_num_layers",
        bool,
        "with context parallelism the tokens that it looks ahead to are on other ranks: write "
        f"--context-parallel-size 1, or {_WITHOUT_SLICES}",
        matters=_shares_sequences,
    ),
    RefusedSetting(
        "context_parallel_size",
        _is_several,
        "Transformer Engine divides attention of packed sequences over ranks in its own way: write "
        f"--context-parallel-size 1, or {_WITHOUT_SLICES}",
        matters=_packs_sequences,
    ),
    RefusedSetting(
        "micro_batch_size",
        _is_several,
        f"several packed sequences make one longer row: write --micro-batch-size 1, or "
        f"{_WITHOUT_SLICES}",
        matters=_packs_sequences,
    ),
    RefusedSetting(
        "variable_seq_lengths",
        bool,
        f"slices need one length: give all microbatches one sequence length, or {_WITHOUT_SLICES}",
    ),
    RefusedSetting(
        "cuda_graph_impl",
        lambda value: value == "transformer_engine",
        f"a graph has one shape, and slices attend to ever more: write --cuda-graph-impl none, or "
        f"{_WITHOUT_SLICES}",
    ),
    *(
        RefusedSetting(name, bool, f"{kind} carries a state over slices: {_WITHOUT_SLICES}")
        for name, kind in (
            ("hybrid_layer_pattern", "a hybrid model"),
            ("hybrid_override_pattern", "a hybrid model"),
            ("is_hybrid_model", "a hybrid model"),
        )
    ),
    RefusedSetting(
        "experimental_attention_variant",
        lambda value: value not in (None, False, "dsa"),
        f"it carries a state over slices: {_WITHOUT_SLICES}",
    ),
    *(
        RefusedSetting(
            name,
            unsupported,
            f"with dsa it is untried: {remedy}, or {_WITHOUT_SLICES}",
            matters=_is_sparse,
        )
        for name, unsupported, remedy in (
            ("sft", bool, "drop --sft"),
            (
                "dataloader_inter_document_masking",
                bool,
                "drop --dataloader-inter-document-masking",
            ),
            ("context_parallel_size", _is_several, "write --context-parallel-size 1"),
            ("dsa_indexer_topk_freq", _is_several, "write --dsa-indexer-topk-freq 1"),
            (
                "dsa_kernel_backend",
                lambda value: value not in (None, "none"),
                "write --dsa-kernel-backend none",
            ),
        )
    ),
    *(
        drop(name, "attention of fewer queries than keys is untried in FP8")
        for name in ("fp8_dot_product_attention", "fp8_multi_head_attention")
    ),
    drop("tp_comm_overlap", "its communication buffers are of whole sequences"),
)

_WITHOUT_RECOMPUTE = "drop --pipeline-recompute"
_COUNTED_IN_ORDER = "its sum over microbatches is counted in another order if some are recomputed"


def _draws(settings: Any) -> bool:
    return any(getattr(settings, name, 0) for name in ("hidden_dropout", "attention_dropout"))


def _sums_over_microbatches(balancing: Any) -> bool:
    kinds = balancing if isinstance(balancing, list) else [balancing]
    return not {"global_aux_loss", "quantile_balancing"}.isdisjoint(kinds)


RECOMPUTE_REFUSALS = (
    RefusedSetting(
        "recompute_granularity",
        lambda value: value == "full",
        "Megatron runs all layers again in the backward pass, and keeps their inputs alone: write "
        f"--recompute-granularity selective, or {_WITHOUT_RECOMPUTE}",
    ),
    RefusedSetting(
        "cuda_graph_impl",
        lambda value: value == "transformer_engine",
        f"a CUDA graph is of one forward pass a microbatch: write --cuda-graph-impl none, or "
        f"{_WITHOUT_RECOMPUTE}",
    ),
    *(
        RefusedSetting(
            "fp8_recipe",
            lambda value, recipe=recipe: value == recipe,  # type: ignore[misc]
            f"{why}: write --fp8-recipe tensorwise or mxfp8, or {_WITHOUT_RECOMPUTE}",
            matters=lambda settings: getattr(settings, "fp8", None) is not None,
        )
        for recipe, why in (
            ("delayed", "a pass without gradients does not move scales on"),
            (
                "blockwise",
                "a pass without gradients leaves weights quantised for forward passes alone",
            ),
        )
    ),
    RefusedSetting(
        "moe_router_load_balancing_type",
        _sums_over_microbatches,
        f"{_COUNTED_IN_ORDER}: write aux_loss or seq_aux_loss, or {_WITHOUT_RECOMPUTE}",
    ),
    drop("moe_enable_routing_replay", "a replay gives each choice of experts once"),
    *(
        RefusedSetting(
            name,
            bool,
            f"its random states cannot be taken twice: drop --te-rng-tracker, set "
            f"--hidden-dropout 0 --attention-dropout 0, or {_WITHOUT_RECOMPUTE}",
            matters=_draws,
        )
        for name in ("te_rng_tracker", "use_te_rng_tracker")
    ),
    RefusedSetting(
        "cpu_offloading",
        bool,
        f"drop --cpu-offloading-num-layers, or {_WITHOUT_RECOMPUTE}",
    ),
)


def _pairs(settings: Any, resolved: ResolvedSpec, options: ScheduleOptions) -> str | None:
    return FLAG if with_requested_pairs(options, settings).pairs else None


def _graphs(settings: Any, resolved: ResolvedSpec, options: ScheduleOptions) -> str | None:
    return GRAPHS if captures(settings) else None


def _slices(settings: Any, resolved: ResolvedSpec, options: ScheduleOptions) -> str | None:
    count = options.slices.count
    return flag_with_value("slices", count) if count > 1 else None


def _recompute(settings: Any, resolved: ResolvedSpec, options: ScheduleOptions) -> str | None:
    if options.recompute == Recompute() and resolved.recomputes:
        return f"{flag('schedule')} {resolved.spec}, which recomputes,"
    return by_option("recompute")(settings, resolved, options)


# Features with a folder of their own whose refusals and handled settings are in the tables here.
FEATURES: tuple[FeatureRefusals, ...] = (
    VOCABULARY_REFUSALS,
    OFFLOAD_REFUSALS,
    POST_VALIDATION_REFUSALS,
)

REFUSALS = (
    RefusalGroup("refusals", SCHEDULE_REFUSALS, by_schedule),
    RefusalGroup("pairs refusals", PAIRS_REFUSALS, _pairs, options=ScheduleOptions(pairs=True)),
    RefusalGroup("graph refusals", GRAPH_REFUSALS, _graphs, {"cuda_graph_impl": IMPLEMENTATION}),
    *VOCABULARY_REFUSALS.groups,
    *OFFLOAD_REFUSALS.groups,
    RefusalGroup(
        "recompute refusals",
        RECOMPUTE_REFUSALS,
        _recompute,
        options=ScheduleOptions(recompute=Recompute(first=1)),
    ),
    RefusalGroup(
        "slices refusals", SLICES_REFUSALS, _slices, options=ScheduleOptions(slices=Slices(4))
    ),
    *POST_VALIDATION_REFUSALS.groups,
)
