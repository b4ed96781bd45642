"""One table: each feature, its patches, when it is wanted; and what is refused beside it.

Refused is the default for whatever nobody has made work together. A refusal is one line: what
clashes, and what to write instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ext.config import PipelineConfig
from megatron_ext.patches import transformer_engine
from megatron_ext.patches.engine import Patch, PatchError
from megatron_ext.schedule.kinds import RULES, Duty
from megatron_ext.schedule.placement import Placement, is_line_or_v
from megatron_ext.schedule.registry import Choice, with_option
from megatron_ext.schedule.schedule import Offload, Schedule, VocabularyParallel


@dataclass(frozen=True)
class Feature:
    """Something a user switches on.

    ``modules`` (below patches) have ``patches(config) -> tuple[Patch, ...]``. Without
    ``wanted`` every launch with a flag of ours has it, with it a launch whose schedule says so,
    with ``asked_for`` one whose settings do.
    """

    name: str
    modules: tuple[str, ...]
    wanted: Callable[[Choice], bool] | None
    asked_for: Callable[[PipelineConfig], bool] = lambda config: True

    def is_wanted(self, config: PipelineConfig) -> bool:
        if self.wanted is None:
            return True
        if config.schedule is None:
            return False
        return self.wanted(config.choice()) and self.asked_for(config)

    def patches(self, config: PipelineConfig) -> list[Patch]:
        """Its patches; raises PatchError where Megatron lacks something that they import."""
        package = "megatron_ext.patches"
        try:
            modules = [importlib.import_module(f"{package}.{name}") for name in self.modules]
        except ImportError as error:
            raise PatchError(f"{self.name}: what its patches need is missing: {error}") from error
        return [patch for module in modules for patch in module.patches(config)]


def _splits(choice: Choice) -> bool:
    return choice.splits_backward


def _moves_stages(choice: Choice) -> bool:
    return not choice.example.in_turn


def _moves_first_stage(choice: Choice) -> bool:
    return choice.example.rank_of[0] != 0


def _parts_the_ends(choice: Choice) -> bool:
    return choice.example.rank_of[0] != choice.example.rank_of[-1]


FEATURES = (
    Feature("flags", ("megatron.training.arguments",), None),
    Feature(
        "schedule",
        ("megatron.core.pipeline_parallel.schedules", "megatron.training.checkpointing"),
        lambda choice: True,
    ),
    Feature(
        "optimizer states that any placement can load",
        ("megatron.core.optimizer.distrib_optimizer",),
        lambda choice: True,
    ),
    Feature(
        "split backward of local linear layers",
        ("megatron.core.tensor_parallel.layers",),
        _splits,
    ),
    Feature(
        "split backward of Transformer Engine's linear layers",
        (
            "transformer_engine.pytorch.module._common",
            "megatron.core.distributed.distributed_data_parallel",
        ),
        _splits,
    ),
    Feature(
        "virtual stages",
        ("megatron.core.transformer.transformer_config", "megatron.core.parallel_state"),
        lambda choice: choice.example.chunks > 1,
    ),
    Feature(
        "a first stage that is not on the first rank",
        (
            "megatron.core.pipeline_parallel.utils",
            "megatron.core.transformer.pipeline_parallel_layer_layout",
            "megatron.core.utils",
            "megatron.core.distributed.finalize_model_grads",
            "megatron.core.dist_checkpointing.strategies.fully_parallel",
            "megatron.core.datasets.blended_megatron_dataset_builder",
            "megatron.core.models.common.language_module.language_module",
            "megatron.training.models.dist_utils",
            "megatron.training.training",
        ),
        _moves_first_stage,
    ),
    Feature(
        "measured costs",
        ("megatron.training.training_end",),
        lambda choice: True,
        asked_for=lambda config: config.profile() is not None,
    ),
    Feature(
        "vocabulary parallelism",
        ("megatron.core.models.gpt.gpt_model",),
        lambda choice: True,
        asked_for=lambda config: config.vocabulary() is not VocabularyParallel.NONE,
    ),
    Feature(
        "post-validation",
        (
            "megatron.post_validation",
            "megatron.core.optimizer_param_scheduler",
            "megatron.training.utils.common_utils",
            "megatron.training.training_log",
            "megatron.training.saving",
            "megatron.training.async_utils",
            "megatron.training.dist_signal_handler",
        ),
        lambda choice: True,
        asked_for=lambda config: config.post_validation,
    ),
)


def wanted_patches(config: PipelineConfig) -> list[Patch]:
    """The patches of all features that ``config`` wants."""
    return [
        patch
        for feature in FEATURES
        if feature.is_wanted(config)
        for patch in feature.patches(config)
    ]


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


REFUSALS = (
    Refusal(
        "transformer_impl",
        lambda value: (
            value != "local"
            and not (value == "transformer_engine" and transformer_engine.can_split())
        ),
        "its backward is not split: write --transformer-impl local, use 1f1b or gpipe, or install "
        "Transformer Engine 2.8 or later",
        by=_splits,
    ),
    Refusal(
        "tp_comm_overlap",
        bool,
        "drop --tp-comm-overlap: Transformer Engine cannot put off a weight gradient whose GEMM "
        "overlaps communication",
        by=_splits,
    ),
    Refusal(
        "use_transformer_engine_op_fuser",
        bool,
        "drop --use-transformer-engine-op-fuser: its operations have no weight gradient of their "
        "own to put off",
        by=_splits,
    ),
    Refusal(
        "gtp_weight_remat_size",
        lambda value: value > 1,
        "drop --tensor-parallel-num-weight-shards",
        by=_splits,
    ),
    *(
        Refusal(
            name,
            bool,
            f"drop --{name.replace('_', '-')}: the experts' weight gradients are put off weight by "
            f"weight",
            by=_splits,
        )
        for name in ("moe_single_grouped_weight", "moe_single_grouped_bias")
    ),
    Refusal(
        "use_grouped_gemm_for_shared_expert",
        bool,
        "drop --use-grouped-gemm-for-shared-expert: its operations are Transformer Engine's fused "
        "ones, whose weight gradients cannot be put off",
        by=_splits,
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
        by=_moves_first_stage,
    ),
    Refusal(
        "init_model_with_meta_device",
        bool,
        "drop --init-model-with-meta-device",
        by=_moves_first_stage,
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


def refuse(
    settings: Any,
    choice: Choice,
    vocabulary: VocabularyParallel = VocabularyParallel.NONE,
    offload: Offload = Offload.NONE,
    post_validation: bool = False,
) -> None:
    """Raise ValueError for the first of ``settings`` that ``choice`` cannot honour.

    ``settings`` are Megatron's parsed arguments or a TransformerConfig.
    """
    placement = choice.place(settings.pipeline_model_parallel_size)
    _refuse_placement(choice, placement)
    chunks = settings.virtual_pipeline_model_parallel_size or 1
    if chunks != placement.chunks:
        raise ValueError(
            f"--pipeline-schedule {choice.spec} has {placement.chunks} stages a rank, but the "
            f"virtual-stage flags or the layout say {chunks}: drop them"
            + (f", or write {_with_chunks(choice, chunks)}" if placement.name == "loop" else "")
        )
    group = getattr(settings, "microbatch_group_size_per_vp_stage", None)
    if group not in (None, placement.ranks):
        raise ValueError(
            f"--pipeline-schedule {choice.spec} does not go with "
            f"microbatch_group_size_per_vp_stage={group}: the group is an option of the schedules "
            f"that have one; write {with_option(choice.spec, 'group', group)} in its place"
        )
    _refuse_settings(settings, choice, REFUSALS, f"--pipeline-schedule {choice.spec}")
    if vocabulary is not VocabularyParallel.NONE:
        ours = f"--pipeline-vocab-parallel {vocabulary}"
        if not is_line_or_v(placement):
            raise ValueError(
                f"{ours} does not go with --pipeline-schedule {choice.spec}, whose stages are on "
                f"ranks {list(placement.rank_of)}: choose a schedule with one stage a rank, in "
                f"order, or a V such as zb-v, v-half or v-auto"
            )
        _refuse_settings(settings, choice, VOCABULARY_REFUSALS, ours)
    if offload is not Offload.NONE:
        ours = f"--pipeline-activation-offload {offload}"
        _refuse_settings(settings, choice, OFFLOAD_REFUSALS, ours)
    if post_validation:
        ours = "--pipeline-post-validation"
        _refuse_settings(settings, choice, POST_VALIDATION_REFUSALS, ours)
        _refuse_barriers(settings, ours)


def _refuse_barriers(settings: Any, ours: str) -> None:
    level = getattr(settings, "timing_log_level", 0)
    if level >= 1 and settings.barrier_with_L1_time:
        raise ValueError(
            f"{ours} does not go with timing_log_level={level}: its timers have all ranks wait for "
            f"one another; write --no-barrier-with-level-1-timing"
        )


def _refuse_settings(
    settings: Any, choice: Choice, refusals: tuple[Refusal, ...], ours: str
) -> None:
    for refusal in refusals:
        if not refusal.by(choice):
            continue
        value = getattr(settings, refusal.setting, None)
        if value is not None and refusal.unsupported(value):
            raise ValueError(
                f"{ours} does not go with {refusal.setting}={value}: {refusal.instead}"
            )


def refuse_order(settings: Any, schedule: Schedule) -> None:
    """Raise ValueError where a stage's first weight gradient must be that of its first microbatch.

    Transformer Engine writes that one over ``main_grad``, when it fuses the accumulation, and adds
    the others.
    """
    overwrites = (
        settings.transformer_impl == "transformer_engine" and settings.gradient_accumulation_fusion
    )
    if not overwrites:
        return
    begun = set()
    for action in (action for row in schedule.compute_rows for action in row):
        if Duty.WEIGHT_GRADIENT not in RULES[action.kind].covers or action.stage in begun:
            continue
        begun.add(action.stage)
        if action.microbatch != 0:
            raise ValueError(
                f"{schedule.name} begins stage {action.stage}'s weight gradients with {action}, "
                f"and Transformer Engine writes those of microbatch 0 over the sum so far: put "
                f"them first, or add --no-gradient-accumulation-fusion"
            )


def _with_chunks(choice: Choice, chunks: int) -> str:
    return with_option(choice.spec.split(":")[0], "vpp", chunks)


def _refuse_placement(choice: Choice, placement: Placement) -> None:
    """For a file, whose stages can be anywhere."""
    counts = [len(stages) for stages in placement.stages_of]
    if len(set(counts)) > 1:
        raise ValueError(
            f"--pipeline-schedule {choice.spec} puts {counts} stages on its ranks: Megatron's "
            f"ranks all have the same number of stages; give each as many"
        )
    if placement.rank_of[-1] != placement.ranks - 1:
        raise ValueError(
            f"--pipeline-schedule {choice.spec} puts the last stage on pipeline rank "
            f"{placement.rank_of[-1]}: Megatron looks for the loss on the last one, "
            f"{placement.ranks - 1}; renumber the ranks"
        )
