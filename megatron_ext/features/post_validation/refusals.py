"""Refusals of post-validation, and the patches that it needs.

A step that can be rolled back must know everything that it changes. Optimizers, losses and loops
with an effect that cannot be undone are refused with the reason.
"""

from __future__ import annotations

from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals
from megatron_ext.adapter.handled_settings.refused_setting import (
    RefusalGroup,
    RefusedSetting,
    by_option,
    drop,
    parts_the_ends,
)
from megatron_ext.schedule.problem import ScheduleOptions

_TAKEN_BACK = "a step must be one that can be taken back"
_WITHOUT_POST_VALIDATION = "drop --pipeline-post-validation"

OPTIMIZER_REFUSALS = (
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
    drop("optimizer_cuda_graph", "a step is not one call"),
    *(
        drop(name, "quantised parameters are untried")
        for name in ("fp8_param_gather", "fp4_param_gather")
    ),
    drop("reuse_grad_buf_for_mxfp8_param_ag", "gradients must stay until their step is settled"),
    drop("use_megatron_fsdp", "its parameters are kept elsewhere"),
    RefusedSetting(
        "num_distributed_optimizer_instances",
        lambda value: value > 1,
        "drop --num-distributed-optimizer-instances: no group has the ranks of one instance that "
        "share a stage, whose norm is needed",
    ),
    RefusedSetting(
        "gtp_weight_remat_size", lambda value: value > 1, "drop --tensor-parallel-num-weight-shards"
    ),
    drop("log_num_zeros_in_grad", "zeros are counted over the whole pipeline in every step"),
    RefusedSetting(
        "qk_clip",
        bool,
        f"it changes parameters after the step, which is not undone: {_WITHOUT_POST_VALIDATION}",
    ),
)

_WAITS_EACH_STEP = "all ranks would wait for one another in every step"
_MEETS_FORWARDS_TWICE = "a step that is taken back runs some forward passes twice"

_REFUSED = (
    *OPTIMIZER_REFUSALS,
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
        drop(name, "it changes or reads weights after a step that may be taken back")
        for name in ("log_max_attention_logit", "save_params_interval")
    ),
    *(
        drop(name, _MEETS_FORWARDS_TWICE)
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
        by=parts_the_ends,
    ),
    RefusedSetting(
        "untie_embeddings_and_output_weights",
        lambda value: not value,
        "the first and the last rank would wait for one another's gradients of tied weights: write "
        "--untie-embeddings-and-output-weights, or choose a V such as zb-v",
        by=parts_the_ends,
    ),
    RefusedSetting(
        "timing_log_level",
        lambda value: value >= 1,
        "its timers have all ranks wait for one another; write --no-barrier-with-level-1-timing",
        matters=lambda settings: getattr(settings, "barrier_with_L1_time", True),
    ),
)

POST_VALIDATION_REFUSALS = FeatureRefusals(
    may_be_on=lambda config: config.post_validation,
    name="post-validation",
    patches=(
        "megatron.core.optimizer.optimizer.steps",
        "megatron.core.optimizer_param_scheduler",
        "megatron.training.utils.common_utils",
        "megatron.training.training.training_log",
        "megatron.training.training.saving",
        "megatron.training.async_utils",
        "megatron.training.dist_signal_handler",
    ),
    groups=(
        RefusalGroup(
            "post-validation refusals",
            _REFUSED,
            by_option("steps_overlap"),
            options=ScheduleOptions(steps_overlap=True),
        ),
    ),
)
