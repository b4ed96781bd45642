"""What is refused beside our schedules and settings, a line each: what clashes, and what to write
instead.

Refused is the default for whatever nobody has made work together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ext.patches import transformer_engine
from megatron_ext.patches.features import moves_first_stage, splits
from megatron_ext.schedule.registry import Choice


@dataclass(frozen=True)
class Refusal:
    """A setting that does not go with our schedules.

    ``setting`` is its name in Megatron's arguments and configs, ``unsupported`` tells of a value
    whether it is refused (it is not called where the setting does not exist), ``instead`` what to
    write. ``by``: which schedules refuse it.
    """

    setting: str
    unsupported: Callable[[Any], bool]
    instead: str
    by: Callable[[Choice], bool] = lambda choice: True


def _moves_stages(choice: Choice) -> bool:
    return not choice.example.in_turn


def _parts_the_ends(choice: Choice) -> bool:
    return choice.example.rank_of[0] != choice.example.rank_of[-1]


REFUSALS = (
    Refusal(
        "transformer_impl",
        lambda value: (
            value != "local"
            and not (value == "transformer_engine" and transformer_engine.can_split())
        ),
        "its backward is not split: write --transformer-impl local, use 1f1b or gpipe, or install "
        "Transformer Engine 2.8 or later",
        by=splits,
    ),
    Refusal(
        "tp_comm_overlap",
        bool,
        "drop --tp-comm-overlap: Transformer Engine cannot put off a weight gradient whose GEMM "
        "overlaps communication",
        by=splits,
    ),
    Refusal(
        "use_transformer_engine_op_fuser",
        bool,
        "drop --use-transformer-engine-op-fuser: its operations have no weight gradient of their "
        "own to put off",
        by=splits,
    ),
    Refusal(
        "gtp_weight_remat_size",
        lambda value: value > 1,
        "drop --tensor-parallel-num-weight-shards",
        by=splits,
    ),
    *(
        Refusal(
            name,
            bool,
            f"drop --{name.replace('_', '-')}: the experts' weight gradients are put off weight by "
            f"weight",
            by=splits,
        )
        for name in ("moe_single_grouped_weight", "moe_single_grouped_bias")
    ),
    Refusal(
        "use_grouped_gemm_for_shared_expert",
        bool,
        "drop --use-grouped-gemm-for-shared-expert: its operations are Transformer Engine's fused "
        "ones, whose weight gradients cannot be put off",
        by=splits,
    ),
    Refusal("defer_embedding_wgrad_compute", bool, "drop --defer-embedding-wgrad-compute"),
    Refusal("delay_wgrad_compute", bool, "drop --delay-wgrad-compute: the schedule places W"),
    Refusal(
        "overlap_dispatch_backward_with_experts_wgrad",
        bool,
        "drop --overlap-dispatch-backward-with-experts-wgrad: the schedule places W",
    ),
    Refusal("overlap_moe_expert_parallel_comm", bool, "drop --overlap-moe-expert-parallel-comm"),
    Refusal("hybrid_context_parallel", bool, "drop --hybrid-context-parallel"),
    Refusal(
        "fine_grained_activation_offloading", bool, "drop --fine-grained-activation-offloading"
    ),
    Refusal("moe_paged_stash", bool, "drop --moe-paged-stash"),
    Refusal(
        "cuda_graph_impl",
        lambda value: value not in (None, "none"),
        "write --cuda-graph-impl none: Megatron captures its own pipeline order",
    ),
    Refusal(
        "num_microbatches_with_partial_activation_checkpoints",
        bool,
        "drop --num-microbatches-with-partial-activation-checkpoints",
    ),
    Refusal(
        "overlap_param_gather_with_optimizer_step",
        bool,
        "drop --overlap-param-gather-with-optimizer-step",
    ),
    Refusal(
        "overlap_p2p_comm_warmup_flush",
        bool,
        "drop --overlap-p2p-communication-warmup-flush: receives are posted ahead anyway",
    ),
    Refusal("mtp_num_layers", bool, "drop --mtp-num-layers"),
    Refusal("mtp_standalone", bool, "drop the standalone MTP stage from the layout"),
    Refusal("use_ring_exchange_p2p", bool, "drop --use-ring-exchange-p2p"),
    Refusal("use_megatron_fsdp", bool, "drop --use-megatron-fsdp"),
    Refusal("use_torch_fsdp2", bool, "drop --use-torch-fsdp2"),
    Refusal(
        "ckpt_format",
        lambda value: value != "torch_dist",
        "a rank's stages are others than stock's, and only --ckpt-format torch_dist can be loaded "
        "wherever stages are",
        by=_moves_stages,
    ),
    Refusal(
        "dataloader_save",
        bool,
        "drop --dataloader-save: Megatron would save the state of a loader on the first pipeline "
        "rank, which reads no data here",
        by=moves_first_stage,
    ),
    Refusal(
        "init_model_with_meta_device",
        bool,
        "drop --init-model-with-meta-device",
        by=moves_first_stage,
    ),
    Refusal("yaml_cfg", bool, "give Megatron's settings as flags, not by --yaml-cfg"),
)

_MADE_BY_PASSES = "the loss is made by passes of the schedule"

VOCABULARY_REFUSALS = (
    Refusal(
        "cross_entropy_loss_fusion",
        bool,
        f"drop --cross-entropy-loss-fusion: {_MADE_BY_PASSES}",
    ),
    Refusal(
        "fp16_lm_cross_entropy", bool, f"drop --fp16-lm-cross-entropy: {_MADE_BY_PASSES}, in fp32"
    ),
    Refusal("use_mup", bool, "drop --use-mup: the logits are not scaled"),
    Refusal("fp8_output_proj", bool, "drop --fp8-output-proj: the logits are not made in fp8"),
    Refusal("context_parallel_size", lambda value: value > 1, "context parallelism is untried"),
    Refusal("sft", bool, "drop --sft: packed sequences are untried"),
    Refusal("logits_load_dir", bool, f"drop --logits-load-dir: {_MADE_BY_PASSES}, from labels"),
    Refusal("modelopt_enabled", bool, "models of ModelOpt are untried"),
    Refusal("init_model_with_meta_device", bool, "drop --init-model-with-meta-device"),
    Refusal(
        "ckpt_format",
        lambda value: value != "torch_dist",
        "a rank's rows are others than stock's, and only --ckpt-format torch_dist can be loaded "
        "wherever rows are",
    ),
    Refusal(
        "variable_seq_lengths",
        bool,
        "collectives need one shape: give all microbatches one sequence length",
    ),
    Refusal(
        "gtp_weight_remat_size", lambda value: value > 1, "drop --tensor-parallel-num-weight-shards"
    ),
)

OFFLOAD_REFUSALS = (
    Refusal("cpu_offloading", bool, "drop --cpu-offloading-num-layers: the schedule places copies"),
    *(
        Refusal(name, bool, f"drop --{name}-format: quantised activations are untried")
        for name in ("fp8", "fp4")
    ),
    Refusal("context_parallel_size", lambda value: value > 1, "context parallelism is untried"),
    Refusal(
        "tp_comm_overlap",
        bool,
        "drop --tp-comm-overlap: activations in its communication buffers are untried",
    ),
)

_TAKEN_BACK = "a step must be one that can be taken back"

POST_VALIDATION_OPTIMIZER_REFUSALS = (
    Refusal(
        "optimizer",
        lambda value: value not in ("adam", "sgd"),
        f"write --optimizer adam or sgd: {_TAKEN_BACK}",
    ),
    Refusal(
        "use_layer_wise_distributed_optimizer",
        bool,
        f"drop --use-layer-wise-distributed-optimizer: {_TAKEN_BACK}",
    ),
    Refusal(
        "optimizer_cpu_offload",
        bool,
        "drop --optimizer-cpu-offload: its step writes to copies of its own",
    ),
    Refusal(
        "use_precision_aware_optimizer",
        bool,
        "drop --use-precision-aware-optimizer: the main parameters are inside the optimizer",
    ),
    Refusal("optimizer_cuda_graph", bool, "drop --optimizer-cuda-graph: a step is not one call"),
    *(
        Refusal(
            name,
            bool,
            f"drop --{name.replace('_', '-')}: quantised parameters are untried",
        )
        for name in ("fp8_param_gather", "fp4_param_gather")
    ),
    Refusal(
        "reuse_grad_buf_for_mxfp8_param_ag",
        bool,
        "drop --reuse-grad-buf-for-mxfp8-param-ag: gradients must stay until their step is settled",
    ),
    Refusal(
        "use_megatron_fsdp", bool, "drop --use-megatron-fsdp: its parameters are kept elsewhere"
    ),
    Refusal(
        "num_distributed_optimizer_instances",
        lambda value: value > 1,
        "drop --num-distributed-optimizer-instances: several instances are untried",
    ),
    Refusal(
        "gtp_weight_remat_size", lambda value: value > 1, "drop --tensor-parallel-num-weight-shards"
    ),
    Refusal(
        "log_num_zeros_in_grad",
        bool,
        "drop --log-num-zeros-in-grad: zeros are counted over the whole pipeline in every step",
    ),
    Refusal(
        "qk_clip", bool, "drop --qk-clip: it changes parameters after the step, which is not undone"
    ),
)

_WAITS_EACH_STEP = "all ranks would wait for one another in every step"
_MEETS_FORWARDS_TWICE = "a step that is taken back runs some forward passes twice"

POST_VALIDATION_REFUSALS = (
    *POST_VALIDATION_OPTIMIZER_REFUSALS,
    Refusal(
        "rerun_mode",
        lambda value: value != "disabled",
        f"{_WAITS_EACH_STEP} to compare results: write --rerun-mode disabled",
    ),
    Refusal(
        "exit_duration_in_mins",
        bool,
        f"{_WAITS_EACH_STEP} to compare clocks: write --exit-interval or --exit-signal-handler",
    ),
    Refusal("log_params_norm", bool, f"{_WAITS_EACH_STEP}: drop --log-params-norm"),
    *(
        Refusal(name, bool, f"{_WAITS_EACH_STEP} to count packed tokens: drop {flag}")
        for name, flag in (
            ("sft", "--sft"),
            ("dataloader_inter_document_masking", "--dataloader-inter-document-masking"),
        )
    ),
    Refusal("dsa_indexer_loss_coeff", bool, f"{_WAITS_EACH_STEP}: drop --dsa-indexer-loss-coeff"),
    *(
        Refusal(
            name,
            bool,
            f"drop --{name.replace('_', '-')}: it changes or reads weights "
            "after a step that may be taken back",
        )
        for name in ("log_max_attention_logit", "save_params_interval")
    ),
    *(
        Refusal(name, bool, f"drop --{name.replace('_', '-')}: {_MEETS_FORWARDS_TWICE}")
        for name in ("save_activations_interval", "save_dgrads_interval")
    ),
    Refusal(
        "num_experts",
        bool,
        f"{_MEETS_FORWARDS_TWICE}, and routers keep state of theirs: models with experts are "
        f"untried",
    ),
    *(
        Refusal(
            name,
            bool,
            f"drop --{name}-format: {_MEETS_FORWARDS_TWICE}, and scaling factors keep state of "
            f"theirs",
        )
        for name in ("fp8", "fp4")
    ),
    Refusal("perform_rl_step", bool, "drop --perform-rl-step: its loop reads weights each step"),
    Refusal("vision_pretraining", bool, "its own updates of a step cannot be taken back"),
    Refusal("freeze_all_layers", bool, "drop --freeze-all-layers: there is no step to validate"),
    Refusal(
        "variable_seq_lengths",
        bool,
        "messages that are dropped need a known shape: give all microbatches one sequence length",
    ),
    Refusal(
        "calculate_per_token_loss",
        bool,
        "tokens are counted on the last stage, and a step's validation begins at the first: choose "
        "a V such as zb-v, which has both on one rank, or drop --calculate-per-token-loss",
        by=_parts_the_ends,
    ),
    Refusal(
        "untie_embeddings_and_output_weights",
        lambda value: not value,
        "the first and the last rank would wait for one another's gradients of tied weights: write "
        "--untie-embeddings-and-output-weights, or choose a V such as zb-v",
        by=_parts_the_ends,
    ),
)
