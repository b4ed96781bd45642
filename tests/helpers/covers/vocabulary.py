"""The settings that recipes have, one on each line, and the values of each that a test must show.

A setting is named as in Megatron's arguments and configs, or as in Megatron-Bridge's where Megatron
has none. A setting that is not named in this module is unknown, both in a recipe and in the mark of
a test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from megatron_ext.adapter.layout_arguments import ENDS, ENDS_IN_CONFIGS
from tests.helpers.covers.feature import (
    Feature,
    Setting,
    Value,
    anything,
    at_least,
    each_of,
    given,
    number,
    one_of,
    switch,
)

# kinds of schedules: zb-h1's placement, interleaved-zb's, and those of V and wave schedules
KINDS = ("line", "loop", "v")
GRADES = ("A", "B", "C")  # grades of tests, the best one first

LOW_PRECISIONS = ("fp8_delayed", "fp8_cs", "fp8_mx", "fp8_sc", "nvfp4")
CAPTURED = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba", "layer")
# Value that stands for whole layers: these are captured if cuda_graph_scope names no modules.
WHOLE_LAYERS = "layer"
_RECOMPUTED = (
    *("core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mhc"),
    *("gdn", "gdn_norm_out", "mamba"),
)
_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


def _layout(value: Value) -> tuple[str, ...]:
    """Return the class of a layout: with empty stages, or only with different numbers of layers."""
    if value is None:
        return ()
    return ("with empty stages",) if re.search(r"\|(\||[mL])|E\|", str(value)) else ("",)


def _symbols(value: Value) -> tuple[str, ...]:
    """Return the kinds of layers in a hybrid model's pattern, in which | ends a pipeline stage and
    / ends a depth of multi-token prediction."""
    if value is None:
        return ()
    symbols = sorted(set(str(value)) - set("|/"))
    if unknown := set(symbols) - set("M*-EG"):
        raise ValueError(
            f"the layers of a hybrid pattern are M, *, -, E and G, not {', '.join(sorted(unknown))}"
        )
    return tuple(symbols)


def _dense_and_experts(value: Value) -> tuple[str, ...]:
    """Return a class if a model has both dense layers and layers with experts, given as a list or
    as text like ``([0]*3+[1]*58)``."""
    if value is None:
        return ()
    if isinstance(value, int):
        return ("dense and experts",) if value > 1 else ()
    layers = {int(word) for word in re.findall(r"(?<!\*)\b\d+", str(value).replace(" ", ""))}
    return ("dense and experts",) if len(layers) > 1 else ()


def _in_bf16(value: Value) -> tuple[str, ...]:
    return ("False",) if value is False else ()


def _tied(value: Value) -> tuple[str, ...]:
    return ("False",) if value is False else ()


_SIZE = "a size"
_MESSAGES = "how stock's schedules send: ours have messages of their own"
_KERNEL = "within one pass, and one kernel"
_RANKS = "2 ranks stand for more: the same collectives"

SETTINGS = (
    # parallelism
    Setting("pipeline_model_parallel_size", number, "2 ranks stand for more"),
    Setting("virtual_pipeline_model_parallel_size", number, "2 chunks a rank stand for more"),
    Setting("microbatch_group_size_per_vp_stage", given, "another than the number of ranks"),
    Setting("tensor_model_parallel_size", at_least(2), _RANKS),
    Setting("sequence_parallel", switch),
    Setting("context_parallel_size", at_least(2), _RANKS),
    Setting("cp_comm_type", anything, _KERNEL),
    Setting("expert_model_parallel_size", at_least(2), _RANKS),
    Setting("expert_tensor_parallel_size", one_of("1", off=("2", "4", "8")), "beside TP"),
    Setting("use_distributed_optimizer", switch),
    Setting("data_parallel_sharding_strategy", anything, "Megatron-FSDP's alone"),
    Setting("overlap_grad_reduce", switch),
    Setting("overlap_param_gather", switch),
    Setting("overlap_param_gather_with_optimizer_step", switch),
    Setting("average_in_collective", switch),
    Setting("check_for_nan_in_grad", switch),
    Setting("num_distributed_optimizer_instances", at_least(2)),
    Setting("use_layer_wise_distributed_optimizer", switch),
    Setting("tp_comm_overlap", switch, "with TP and sequence parallelism; otherwise it is off"),
    Setting("batch_p2p_comm", anything, _MESSAGES),
    Setting("overlap_p2p_comm", anything, _MESSAGES),
    Setting("deallocate_pipeline_outputs", anything, _MESSAGES),
    Setting("variable_seq_lengths", switch),
    # stages
    Setting("pipeline_model_parallel_layout", _layout),
    Setting("num_layers_in_first_pipeline_stage", given),
    Setting("num_layers_in_last_pipeline_stage", given),
    Setting("account_for_embedding_in_pipeline_split", switch),
    Setting("account_for_loss_in_pipeline_split", switch),
    # the model
    Setting("num_layers", number, _SIZE),
    Setting("hidden_size", number, _SIZE),
    Setting("ffn_hidden_size", number, _SIZE),
    Setting("num_attention_heads", number, _SIZE),
    Setting("num_query_groups", number, _SIZE),
    Setting("kv_channels", number, _SIZE),
    Setting("vocab_size", number, _SIZE),
    Setting("seq_length", number, _SIZE),
    Setting("mamba_head_dim", number, _SIZE),
    Setting("mamba_num_groups", number, _SIZE),
    Setting("mamba_num_heads", number, _SIZE),
    Setting("mamba_state_dim", number, _SIZE),
    Setting("transformer_impl", one_of("transformer_engine", off=("local",))),
    Setting("untie_embeddings_and_output_weights", _tied, "tied ones"),
    Setting("group_query_attention", switch),
    Setting("qk_layernorm", switch),
    Setting("multi_latent_attention", switch),
    Setting("window_size", given, "sliding-window attention in some layers"),
    Setting("softmax_type", one_of("learnable", "off-by-one", off=("vanilla",)), "attention sinks"),
    Setting("attention_output_gate", switch),
    Setting("head_wise_attn_gate", switch),
    Setting("experimental_attention_variant", one_of("gated_delta_net", "dsa", "dsv4_hybrid")),
    Setting("dsa_indexer_loss_coeff", given, "an auxiliary loss in attention"),
    Setting("dsa_indexer_use_sparse_loss", switch),
    Setting("dsa_kernel_backend", anything, _KERNEL),
    Setting("enable_hyper_connections", switch),
    Setting("hybrid_layer_pattern", _symbols),
    Setting("vision", switch, "a tower on the first stage"),
    Setting("freeze_vision_model", switch),
    Setting("freeze_language_model", switch),
    Setting("peft", one_of("lora"), "low-rank adapters on frozen layers"),
    Setting("mtp_num_layers", at_least(1), "one depth stands for more"),
    Setting("mtp_use_repeated_layer", switch),
    Setting("mtp_loss_scaling_factor", number, "a factor"),
    Setting("mtp_eval_in_bf16", anything, "evaluation only"),
    # experts
    Setting("num_experts", at_least(1)),
    Setting("moe_layer_freq", _dense_and_experts),
    Setting("moe_shared_expert_intermediate_size", at_least(1)),
    Setting("moe_shared_expert_gate", switch),
    Setting("moe_latent_size", at_least(1)),
    Setting("moe_n_hash_layers", at_least(1), "routing by the token"),
    Setting("moe_router_num_groups", at_least(2), "routing to some groups of experts"),
    Setting("moe_grouped_gemm", switch),
    Setting("moe_token_dispatcher_type", one_of("alltoall", "allgather", off=("flex",))),
    Setting("moe_flex_dispatcher_backend", one_of("deepep", "hybridep"), "the flex dispatcher's"),
    Setting("moe_shared_expert_overlap", switch),
    Setting("moe_router_dtype", one_of("fp32", "fp64", same=_DTYPES)),
    Setting("moe_router_force_load_balancing", switch),
    Setting("moe_expert_capacity_factor", given),
    Setting("moe_expert_rank_capacity_factor", given),
    Setting("moe_paged_stash", switch),
    Setting("moe_paged_stash_buffer_size_factor_cpu", number, "a factor"),
    Setting("moe_paged_stash_buffer_size_factor_cuda", number, "a factor"),
    Setting("moe_aux_loss_coeff", given),
    Setting("moe_z_loss_coeff", given),
    Setting("overlap_moe_expert_parallel_comm", switch),
    Setting("high_priority_a2a_comm_stream", anything, "its stream's priority"),
    Setting("moe_a2a_overlap", anything, "a name that nothing reads any more"),
    Setting("delay_wgrad_compute", switch),
    Setting("overlap_dispatch_backward_with_experts_wgrad", switch),
    Setting("defer_embedding_wgrad_compute", switch),
    Setting("wgrad_deferral_limit", number, _SIZE),
    # precision
    Setting(
        "precision",
        one_of("bf16", "fp16", *LOW_PRECISIONS, off=("fp32",)),
        "cs: current scaling (tensorwise); mx: MXFP8; sc: sub-channel scaling (blockwise)",
    ),
    Setting("pipeline_dtype", anything, "follows the precision"),
    Setting("fp8_output_proj", switch),
    Setting("first_last_layers_bf16", switch),
    Setting("fp8_param_gather", switch),
    Setting("fp4_param_gather", switch),
    Setting("reuse_grad_buf_for_mxfp8_param_ag", switch),
    Setting("gradient_accumulation_fusion", switch),
    Setting("grad_reduce_in_fp32", _in_bf16, "gradients that add up in bf16"),
    Setting("use_transformer_engine_op_fuser", switch),
    # the loss
    Setting("cross_entropy_loss_fusion", anything, "whether there is the next"),
    Setting("cross_entropy_fusion_impl", one_of("te", "native")),
    Setting("calculate_per_token_loss", switch),
    # memory
    Setting("recompute_granularity", one_of("full", off=("selective",))),
    Setting("recompute_method", one_of("uniform", "block")),
    Setting("recompute_num_layers", number, _SIZE),
    Setting("recompute_modules", each_of(*_RECOMPUTED)),
    Setting("fine_grained_activation_offloading", switch),
    Setting("offload_modules", anything, "which of them"),
    Setting(
        "cuda_graph_impl", one_of("transformer_engine", "local", "full_iteration", off=("none",))
    ),
    Setting("cuda_graph_scope", each_of(*CAPTURED), "Transformer Engine's graphs, by module"),
    # the optimizer
    Setting("optimizer", one_of("sgd", "muon", "dist_muon", off=("adam",))),
    Setting("use_precision_aware_optimizer", switch),
    Setting("main_grads_dtype", one_of("bf16", "fp16", off=("fp32",), same=_DTYPES)),
    Setting("main_params_dtype", one_of("fp16", off=("fp32",), same=_DTYPES)),
    Setting("exp_avg_dtype", one_of("bf16", "fp16", "fp8", off=("fp32",), same=_DTYPES)),
    Setting("exp_avg_sq_dtype", one_of("bf16", "fp16", "fp8", off=("fp32",), same=_DTYPES)),
    Setting("optimizer_cpu_offload", switch),
    Setting("clip_grad", number, "the norm's sum over ranks has an order of its own: within 1e-6"),
    # data
    Setting("packed", switch, "several sequences in a row of a batch, by cu_seqlens"),
    Setting("dataset_kwargs", anything, "how batches are made"),
    Setting("max_packing_seqlen", number, _SIZE),
    Setting("packed_sequence_size", number, _SIZE),
    Setting("ckpt_format", one_of("torch", off=("torch_dist",))),
    Setting("global_batch_size", number, _SIZE),
    Setting("micro_batch_size", number, _SIZE),
)

# Flags of test trainings that no recipe has.
NOT_OF_RECIPES = frozenset(
    (
        *("add_qkv_bias", "add_bias_linear", "disable_bias_linear", "swiglu", "normalization"),
        *("position_embedding_type", "rotary_percent", "no_rope_fusion", "q_lora_rank"),
        *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        *("window_attn_skip_freq", "attention_dropout", "hidden_dropout"),
        *("no_masked_softmax_fusion", "linear_attention_freq", "deterministic_mode"),
        *("moe_router_topk", "moe_router_group_topk", "moe_router_score_function"),
        *("moe_router_pre_softmax", "moe_router_load_balancing_type", "moe_ffn_hidden_size"),
        *("mtp_detach_heads", "num_virtual_stages_per_pipeline_rank", "use_tp_pp_dp_mapping"),
        *("num_layers_per_virtual_pipeline_stage", "dist_ckpt_optim_fully_reshardable"),
        *("no_create_attention_mask_in_dataloader", "dataloader_inter_document_masking"),
        *("null_tokenizer_pad_id", "max_position_embeddings", "use_cpu_initialization"),
        *("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
        *("pipeline_activation_offload", "pipeline_memory_limit", "pipeline_vocab_parallel"),
    )
)

# Names that mean the same setting.
OTHER_NAMES = {
    "sft": "packed",
    "enable_offline_packing": "packed",
    "enable_in_batch_packing": "packed",
    "num_moe_experts": "num_experts",
    **dict(zip(ENDS, ENDS_IN_CONFIGS, strict=True)),
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "cuda_graph_modules": "cuda_graph_scope",
}

# Features that are shown by a GPU test even if the test has not run yet. All other features must be
# shown on the CPU.
ON_GPUS: Mapping[str, tuple[str, ...]] = {
    "precision": LOW_PRECISIONS,
    "fp8_output_proj": ("",),
    "fp8_param_gather": ("",),
    "fp4_param_gather": ("",),
    "reuse_grad_buf_for_mxfp8_param_ag": ("",),
    "first_last_layers_bf16": ("",),
    "cuda_graph_impl": ("transformer_engine",),
    "cuda_graph_scope": CAPTURED,
    "tp_comm_overlap": ("",),
    "moe_flex_dispatcher_backend": ("deepep", "hybridep"),
    "hybrid_layer_pattern": ("M",),
    "experimental_attention_variant": ("dsa",),
    "dsa_indexer_loss_coeff": ("",),
    "dsa_indexer_use_sparse_loss": ("",),
    "optimizer": ("muon", "dist_muon"),
}

# Features that have only a stand-in on the CPU, so no test of grade A shows them.
STAND_INS: Mapping[str, tuple[str, ...]] = {
    "precision": LOW_PRECISIONS,
    "cross_entropy_fusion_impl": ("te",),
    "cuda_graph_impl": ("transformer_engine",),
    "moe_flex_dispatcher_backend": ("deepep", "hybridep"),
    "moe_grouped_gemm": ("",),
    "tp_comm_overlap": ("",),
    "transformer_impl": ("transformer_engine",),
}

# Features that one test must have together. Each feature is already shown with each kind of
# schedule, and all three kinds split the backward pass. So multi-token prediction on V schedules,
# image encoders on loops, and graphs, FP8 and the flex dispatcher with a split backward pass need
# no line here.
TOGETHER = (
    ("mtp_num_layers", "context_parallel_size"),
    ("mtp_num_layers", "packed"),
    ("packed", "context_parallel_size"),
)

_BY_NAME = {setting.name: setting for setting in SETTINGS}
assert len(_BY_NAME) == len(SETTINGS), "a setting has two lines"
assert set(OTHER_NAMES.values()) | set(ON_GPUS) | set(STAND_INS) <= set(_BY_NAME)
_OF_FLAGS = {
    **{name: Setting(name, anything) for name in NOT_OF_RECIPES},
    "bf16": Setting("precision", lambda value: ("bf16",) if value else ()),
    "fp16": Setting("precision", lambda value: ("fp16",) if value else ()),
}


def setting(name: str) -> Setting:
    """Return the setting that is called ``name``.

    Raises:
        ValueError: there is none.
    """
    try:
        return _BY_NAME[OTHER_NAMES.get(name, name)]
    except KeyError:
        raise ValueError(
            f"there is no setting {name!r}: tests/helpers/covers/vocabulary.py has them all"
        ) from None


def is_known(name: str) -> bool:
    """Return whether there is a setting that is called ``name``."""
    return OTHER_NAMES.get(name, name) in _BY_NAME


def features(settings: Mapping[str, Value]) -> frozenset[Feature]:
    """Return the features that ``settings`` switch on, by their names.

    Raises:
        ValueError: a name or a value is unknown.
    """
    return _switched_on(settings, setting)


def features_of_flags(settings: Mapping[str, Value]) -> frozenset[Feature]:
    """Return `features` for a test, whose settings may include flags that no recipe has."""
    return _switched_on(settings, lambda name: _OF_FLAGS.get(name) or setting(name))


def _switched_on(
    settings: Mapping[str, Value], named: Callable[[str], Setting]
) -> frozenset[Feature]:
    return frozenset(
        feature for name, value in settings.items() for feature in named(name).features(value)
    )


def has_a_stand_in(feature: Feature) -> bool:
    """Return whether ``feature`` has only a stand-in on the CPU."""
    return feature.text in STAND_INS.get(feature.setting, ())


def may_wait_for_a_gpu(feature: Feature) -> bool:
    """Return whether a GPU test that has not run may show ``feature``."""
    return feature.text in ON_GPUS.get(feature.setting, ())
