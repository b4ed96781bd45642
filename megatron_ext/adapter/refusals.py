"""Settings of Megatron that our schedules and settings refuse: the setting, the reason, and what to
write instead. `REFUSALS` groups them by feature; checks, pages, records and tests iterate over it.

The default is to refuse: only combinations that have been made to work are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import megatron.core

from megatron_ext.adapter import document_masks
from megatron_ext.adapter.pairs.overlap_setting import FLAG, with_requested_pairs
from megatron_ext.adapter.transformer_engine import installed
from megatron_ext.adapter.transformer_engine.captured import GRAPHS, IMPLEMENTATION, captures
from megatron_ext.base.words import argument_flag
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.config import flag, flag_with_value, setting_of
from megatron_ext.runtime.messages.peers import are_rehearsed
from megatron_ext.schedule.problem import Offload, Recompute, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.slices import Slices


def _every_schedule(resolved: ResolvedSpec) -> bool:
    return True


def _always(settings: Any) -> bool:
    return True


def _loads_or_saves(settings: Any) -> bool:
    folders = ("load", "save", "pretrained_checkpoint")
    return any(getattr(settings, name, None) for name in folders)


@dataclass(frozen=True)
class RefusedSetting:
    """Setting of Megatron that does not work with our schedules.

    Attributes:
        setting: its name in Megatron's arguments and configs.
        unsupported: tells whether a value is refused; not called if the setting does not exist.
        remedy: what to write instead.
        by: tells which schedules refuse it.
        matters: tells whether the setting has an effect, given all the others.
    """

    setting: str
    unsupported: Callable[[Any], bool]
    remedy: str
    by: Callable[[ResolvedSpec], bool] = _every_schedule
    matters: Callable[[Any], bool] = _always


def _drop(
    setting: str, why: str = "", by: Callable[[ResolvedSpec], bool] = _every_schedule
) -> RefusedSetting:
    """Return the refusal of a switch whose flag has the setting's name: the user should drop the
    flag."""
    flag = argument_flag(setting)
    return RefusedSetting(setting, bool, f"drop {flag}: {why}" if why else f"drop {flag}", by)


_splits: Callable[[ResolvedSpec], bool] = attrgetter("traits.splits_backward")
_moves_first_stage: Callable[[ResolvedSpec], bool] = attrgetter("moves_first_stage")


def _moves_stages(resolved: ResolvedSpec) -> bool:
    return not resolved.example.in_turn


def _has_one_stage(resolved: ResolvedSpec) -> bool:
    return resolved.example.chunks == 1


def _has_several_stages(resolved: ResolvedSpec) -> bool:
    return not _has_one_stage(resolved)


def _parts_the_ends(resolved: ResolvedSpec) -> bool:
    return resolved.example.rank_of[0] != resolved.example.rank_of[-1]


def _only_torch_dist(
    why: str, by: Callable[[ResolvedSpec], bool] = _every_schedule
) -> RefusedSetting:
    return RefusedSetting(
        "ckpt_format",
        lambda value: value != "torch_dist",
        f"{why}: to load or save, write --ckpt-format torch_dist. What is of another format, "
        f"Megatron converts: add --load FOLDER --ckpt-convert-format torch_dist "
        f"--ckpt-convert-save OTHER --dist-ckpt-optim-fully-reshardable to the line that wrote it, "
        f"without our flags",
        by,
        _loads_or_saves,
    )


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
    _drop(
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
        _drop(name, "the experts' weight gradients are deferred weight by weight", by=_splits)
        for name in ("moe_single_grouped_weight", "moe_single_grouped_bias")
    ),
    _drop(
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
    _drop("hybrid_context_parallel"),
    _drop("moe_paged_stash"),
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
                "a graph of the whole step has no place for the host, which posts messages when "
                "they are due",
            ),
        )
    ),
    _drop("num_microbatches_with_partial_activation_checkpoints"),
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
    _drop("use_ring_exchange_p2p"),
    _drop("use_megatron_fsdp"),
    _drop("use_torch_fsdp2"),
    _only_torch_dist("a rank's stages are others than stock's", by=_moves_stages),
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
            _drop(
                "dataloader_save",
                "Megatron 0.18 would save it as that of another pipeline rank than the one whose "
                "state is loaded",
                by=_moves_first_stage,
            )
        ]
        if megatron.core.__version__.startswith("0.18")
        else []
    ),
    _drop("init_model_with_meta_device", by=_moves_first_stage),
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

_MADE_BY_PASSES = "the loss is made by passes of the schedule"
_WITHOUT_DIVIDING = "drop --pipeline-vocab-parallel"

VOCABULARY_REFUSALS = (
    _drop("fp16_lm_cross_entropy", f"{_MADE_BY_PASSES}, in fp32"),
    RefusedSetting(
        "use_mup", bool, f"MuP scales the logits, and here they are not: {_WITHOUT_DIVIDING}"
    ),
    _drop("fp8_output_proj", "the logits are not made in fp8"),
    *(
        _drop(name, "the output layer is run by passes of the schedule, which no log would show")
        for name in ("save_activations_interval", "save_dgrads_interval")
    ),
    RefusedSetting(
        "hybrid_layer_pattern", bool, f"it divides the tables of a GPTModel: {_WITHOUT_DIVIDING}"
    ),
    RefusedSetting("logits_load_dir", bool, f"{_MADE_BY_PASSES}, from labels: {_WITHOUT_DIVIDING}"),
    RefusedSetting(
        "modelopt_enabled", bool, f"models of ModelOpt are untried: {_WITHOUT_DIVIDING}"
    ),
    RefusedSetting(
        "mtp_num_layers",
        bool,
        f"multi-token prediction needs whole tables on the last stage: {_WITHOUT_DIVIDING}",
    ),
    _drop("init_model_with_meta_device"),
    _only_torch_dist("a rank's rows are others than stock's"),
    RefusedSetting(
        "variable_seq_lengths",
        bool,
        "collectives need one shape: give all microbatches one sequence length",
    ),
    RefusedSetting(
        "gtp_weight_remat_size", lambda value: value > 1, "drop --tensor-parallel-num-weight-shards"
    ),
)

WITHOUT_OFFLOAD_REFUSALS = (
    RefusedSetting(
        "fine_grained_activation_offloading",
        bool,
        "its copies follow Megatron's own order of passes: write --pipeline-activation-offload "
        "full, or half, whose copies follow the schedule's",
    ),
)

_WITHOUT_OFFLOAD = "drop --pipeline-activation-offload"

OFFLOAD_REFUSALS = (
    RefusedSetting(
        "cpu_offloading",
        bool,
        "drop --cpu-offloading-num-layers: the schedule decides when activations are copied",
    ),
    *(
        RefusedSetting(name, bool, f"quantised activations are untried: {_WITHOUT_OFFLOAD}")
        for name in ("fp8", "fp4")
    ),
    _drop("tp_comm_overlap", "activations in its communication buffers are untried"),
    RefusedSetting(
        "cuda_graph_impl",
        lambda value: value == "transformer_engine",
        "what a CUDA graph keeps for its backward pass stays in its memory: write "
        "--cuda-graph-impl none, or drop --pipeline-activation-offload",
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
    _drop("moe_enable_routing_replay", "a replay is of whole microbatches"),
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
        _drop(name, "attention of fewer queries than keys is untried in FP8")
        for name in ("fp8_dot_product_attention", "fp8_multi_head_attention")
    ),
    _drop("tp_comm_overlap", "its communication buffers are of whole sequences"),
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
    _drop("moe_enable_routing_replay", "a replay gives each choice of experts once"),
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

_TAKEN_BACK = "a step must be one that can be taken back"
_WITHOUT_POST_VALIDATION = "drop --pipeline-post-validation"

POST_VALIDATION_OPTIMIZER_REFUSALS = (
    RefusedSetting(
        "optimizer",
        lambda value: value not in ("adam", "sgd"),
        f"{_TAKEN_BACK}: write --optimizer adam or sgd, or {_WITHOUT_POST_VALIDATION}",
    ),
    RefusedSetting(
        "use_layer_wise_distributed_optimizer",
        bool,
        f"its gradient norm is one sum over all ranks: write --optimizer adam or sgd, or "
        f"{_WITHOUT_POST_VALIDATION}",
    ),
    _drop("optimizer_cuda_graph", "a step is not one call"),
    *(
        _drop(name, "quantised parameters are untried")
        for name in ("fp8_param_gather", "fp4_param_gather")
    ),
    _drop("reuse_grad_buf_for_mxfp8_param_ag", "gradients must stay until their step is settled"),
    _drop("use_megatron_fsdp", "its parameters are kept elsewhere"),
    RefusedSetting(
        "num_distributed_optimizer_instances",
        lambda value: value > 1,
        "drop --num-distributed-optimizer-instances: no group has the ranks of one instance that "
        "share a stage, whose norm is needed",
    ),
    RefusedSetting(
        "gtp_weight_remat_size", lambda value: value > 1, "drop --tensor-parallel-num-weight-shards"
    ),
    _drop("log_num_zeros_in_grad", "zeros are counted over the whole pipeline in every step"),
    RefusedSetting(
        "qk_clip",
        bool,
        f"it changes parameters after the step, which is not undone: {_WITHOUT_POST_VALIDATION}",
    ),
)

_WAITS_EACH_STEP = "all ranks would wait for one another in every step"
_MEETS_FORWARDS_TWICE = "a step that is taken back runs some forward passes twice"

POST_VALIDATION_REFUSALS = (
    *POST_VALIDATION_OPTIMIZER_REFUSALS,
    RefusedSetting(
        "rerun_mode",
        lambda value: value != "disabled",
        f"{_WAITS_EACH_STEP} to compare results: write --rerun-mode disabled",
    ),
    RefusedSetting(
        "exit_duration_in_mins",
        bool,
        f"{_WAITS_EACH_STEP} to compare clocks: write --exit-interval or --exit-signal-handler",
    ),
    RefusedSetting("log_params_norm", bool, f"{_WAITS_EACH_STEP}: drop --log-params-norm"),
    *(
        RefusedSetting(
            name, bool, f"{_WAITS_EACH_STEP} to count packed tokens: {_WITHOUT_POST_VALIDATION}"
        )
        for name in ("sft", "dataloader_inter_document_masking")
    ),
    RefusedSetting(
        "dsa_indexer_loss_coeff", bool, f"{_WAITS_EACH_STEP}: {_WITHOUT_POST_VALIDATION}"
    ),
    *(
        _drop(name, "it changes or reads weights after a step that may be taken back")
        for name in ("log_max_attention_logit", "save_params_interval")
    ),
    *(
        _drop(name, _MEETS_FORWARDS_TWICE)
        for name in ("save_activations_interval", "save_dgrads_interval")
    ),
    RefusedSetting(
        "mtp_num_layers",
        bool,
        f"{_MEETS_FORWARDS_TWICE}, and multi-token prediction would log its losses twice: "
        f"{_WITHOUT_POST_VALIDATION}",
    ),
    RefusedSetting(
        "num_experts",
        bool,
        f"{_MEETS_FORWARDS_TWICE}, and routers keep state of theirs: {_WITHOUT_POST_VALIDATION}",
    ),
    *(
        RefusedSetting(
            name,
            bool,
            f"{_MEETS_FORWARDS_TWICE}, and scaling factors keep state of theirs: "
            f"{_WITHOUT_POST_VALIDATION}",
        )
        for name in ("fp8", "fp4")
    ),
    *(
        RefusedSetting(name, bool, f"{why}: {_WITHOUT_POST_VALIDATION}")
        for name, why in (
            ("perform_rl_step", "its loop reads weights each step"),
            ("vision_pretraining", "its own updates of a step cannot be taken back"),
            ("freeze_all_layers", "there is no step to validate"),
        )
    ),
    RefusedSetting(
        "cuda_graph_impl",
        lambda value: value == "transformer_engine",
        f"{_MEETS_FORWARDS_TWICE}, which is not the order that CUDA graphs are captured in: write "
        f"--cuda-graph-impl none, or {_WITHOUT_POST_VALIDATION}",
    ),
    RefusedSetting(
        "variable_seq_lengths",
        bool,
        "messages that are dropped need a known shape: give all microbatches one sequence length",
    ),
    RefusedSetting(
        "calculate_per_token_loss",
        bool,
        "tokens are counted on the last stage, and a step's validation begins at the first: choose "
        f"a V such as zb-v, which has both on one rank, or {_WITHOUT_POST_VALIDATION}",
        by=_parts_the_ends,
    ),
    RefusedSetting(
        "untie_embeddings_and_output_weights",
        lambda value: not value,
        "the first and the last rank would wait for one another's gradients of tied weights: write "
        "--untie-embeddings-and-output-weights, or choose a V such as zb-v",
        by=_parts_the_ends,
    ),
)


_NO_OPTIONS = ScheduleOptions()

# Returns the flags that request a feature, None if it is absent: of settings, resolved spec and
# options.
Requested = Callable[[Any, ResolvedSpec, ScheduleOptions], str | None]


@dataclass(frozen=True)
class RefusalGroup:
    """Refusals of one feature.

    Attributes:
        name: the part of docs/compatibility.md that lists them.
        refusals: the refused settings.
        requested: returns the flags that request the feature, with which errors begin.
        settings, options: an example of a request.
    """

    name: str
    refusals: tuple[RefusedSetting, ...]
    requested: Requested
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: ScheduleOptions = _NO_OPTIONS


def _by_option(name: str) -> Requested:
    """Return the request of a feature that is an option of the schedule among our settings."""

    def requested(settings: Any, resolved: ResolvedSpec, options: ScheduleOptions) -> str | None:
        value = getattr(options, name)
        is_absent = value == getattr(_NO_OPTIONS, name)
        return None if is_absent else flag_with_value(setting_of(name), value)

    return requested


def _schedule(settings: Any, resolved: ResolvedSpec, options: ScheduleOptions) -> str:
    return f"{flag('schedule')} {resolved.spec}"


def _no_offload(settings: Any, resolved: ResolvedSpec, options: ScheduleOptions) -> str | None:
    is_absent = options.activation_offload is Offload.NONE
    return _schedule(settings, resolved, options) if is_absent else None


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
    return _by_option("recompute")(settings, resolved, options)


REFUSALS = (
    RefusalGroup("refusals", SCHEDULE_REFUSALS, _schedule),
    RefusalGroup("pairs refusals", PAIRS_REFUSALS, _pairs, options=ScheduleOptions(pairs=True)),
    RefusalGroup("graph refusals", GRAPH_REFUSALS, _graphs, {"cuda_graph_impl": IMPLEMENTATION}),
    RefusalGroup(
        "vocabulary refusals",
        VOCABULARY_REFUSALS,
        _by_option("vocab_parallel"),
        options=ScheduleOptions(vocab_parallel=VocabularyParallel.ONE),
    ),
    RefusalGroup("refusals without offload", WITHOUT_OFFLOAD_REFUSALS, _no_offload),
    RefusalGroup(
        "offload refusals",
        OFFLOAD_REFUSALS,
        _by_option("activation_offload"),
        options=ScheduleOptions(activation_offload=Offload.FULL),
    ),
    RefusalGroup(
        "recompute refusals",
        RECOMPUTE_REFUSALS,
        _recompute,
        options=ScheduleOptions(recompute=Recompute(first=1)),
    ),
    RefusalGroup(
        "slices refusals", SLICES_REFUSALS, _slices, options=ScheduleOptions(slices=Slices(4))
    ),
    RefusalGroup(
        "post-validation refusals",
        POST_VALIDATION_REFUSALS,
        _by_option("steps_overlap"),
        options=ScheduleOptions(steps_overlap=True),
    ),
)
