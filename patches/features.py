"""Table of features with their patches and conditions.

A patch that is not needed can only do harm. The table says for each feature when a config needs it
and which modules of patches it has, and imports these modules only then.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.config import PipelineConfig
from megatron_ext.features.arrangement.refusals import ARRANGEMENT_REFUSALS
from megatron_ext.features.metrics.refusals import METRICS_REFUSALS
from megatron_ext.features.offload.refusals import OFFLOAD_REFUSALS
from megatron_ext.features.post_validation.refusals import POST_VALIDATION_REFUSALS
from megatron_ext.features.profile.refusals import PROFILE_REFUSALS
from megatron_ext.features.race.refusals import RACE_REFUSALS
from megatron_ext.features.shared_prompts.refusals import SHARED_PROMPTS_REFUSALS
from megatron_ext.features.trace.refusals import TRACE_REFUSALS
from megatron_ext.features.vocabulary.refusals import VOCABULARY_REFUSALS
from megatron_ext.patches.engine import Patch, PatchError


@dataclass(frozen=True)
class Feature:
    """Entry of the table of features: modules of patches, and the conditions that apply them.

    ``modules`` (below patches) have ``patches(config) -> tuple[Patch, ...]``. Their patches are
    applied if ``for_schedule`` is true of one of the configuration's schedules and ``for_settings``
    is true of its settings. If ``for_schedule`` is None, the patches do not depend on the schedule,
    and a configuration without one may have them.
    """

    name: str
    modules: tuple[str, ...]
    for_schedule: Callable[[ResolvedSpec], bool] | None
    for_settings: Callable[[PipelineConfig], bool] = lambda config: True

    def applies_to(self, config: PipelineConfig) -> bool:
        if self.for_schedule is not None and (
            config.schedule is None or not any(map(self.for_schedule, config.resolved_specs))
        ):
            return False
        return self.for_settings(config)

    def patches(self, config: PipelineConfig) -> list[Patch]:
        """Return the patches of this feature.

        Raises PatchError if a module of patches cannot be imported, for example because Megatron
        lacks a name that the module imports.
        """
        package = "megatron_ext.patches"
        try:
            modules = [importlib.import_module(f"{package}.{name}") for name in self.modules]
        except Exception as error:  # a module may raise anything while it is imported
            reason = f"{type(error).__name__}: {error}"
            raise PatchError(
                f"{self.name}: something that its patches import is missing: {reason}"
            ) from error
        return [patch for module in modules for patch in module.patches(config)]


def _in_a_folder(
    part: FeatureRefusals, for_schedule: Callable[[ResolvedSpec], bool] | None = None
) -> Feature:
    """Return the table's entry for ``part``, a feature in a folder of megatron_ext/features.

    A configuration gets the patches if ``for_schedule`` is true of its schedule and the folder's
    own condition of its settings.
    """
    return Feature(part.name, part.patches, for_schedule, part.may_be_on)


# Features whose patches act after the last step of a training.
_FINISHING: tuple[FeatureRefusals, ...] = (
    METRICS_REFUSALS,
    TRACE_REFUSALS,
    PROFILE_REFUSALS,
    RACE_REFUSALS,
)

FEATURES = (
    Feature("flags", ("megatron.training.arguments",), None),
    Feature(
        "schedule",
        (
            "megatron.core.pipeline_parallel.schedules.ours",
            "megatron.core.parallel_state.ending",
            "megatron.training.checkpointing.optimizer_states",
            "megatron.training.checkpointing.pending_step",
        ),
        lambda resolved: True,
    ),
    Feature(
        "settings whose work the schedule does",
        ("megatron.core.transformer.module",),
        lambda resolved: True,
    ),
    Feature(
        "optimizer states that any placement can load",
        ("megatron.core.optimizer.distrib_optimizer",),
        lambda resolved: True,
    ),
    Feature(
        "split backward of local linear layers",
        ("megatron.core.tensor_parallel.layers",),
        lambda resolved: resolved.traits.splits_backward,
    ),
    Feature(
        "split backward of Transformer Engine's linear layers",
        ("transformer_engine.pytorch.module._common",),
        lambda resolved: resolved.traits.splits_backward,
    ),
    Feature(
        "gradients that autograd does not bring",
        ("megatron.core.distributed.distributed_data_parallel",),
        lambda resolved: True,
        for_settings=lambda config: config.splits_backward or OFFLOAD_REFUSALS.may_be_on(config),
    ),
    Feature(
        "reductions of gradients that start before the step ends",
        ("megatron.core.distributed.param_and_grad_buffer.started_reductions",),
        lambda resolved: True,
    ),
    _in_a_folder(TRACE_REFUSALS, lambda resolved: True),
    Feature(
        "datasets on all ranks that read them",
        (
            "megatron.core.datasets.blended_megatron_dataset_builder",
            "megatron.training.training.loaders",
        ),
        lambda resolved: True,
    ),
    Feature(
        "per-layer CUDA graphs in the order of the schedule",
        ("megatron.core.transformer.cuda_graphs",),
        lambda resolved: True,
    ),
    Feature(
        "CUDA graphs captured while the watchdog runs",
        ("torch.cuda.graphs",),
        lambda resolved: True,
    ),
    Feature(
        "virtual stages",
        (
            "megatron.core.transformer.transformer_config",
            "megatron.core.parallel_state.first_stage",
            "megatron.training.training.packed_tokens",
            "megatron.training.training.chunks",
            "megatron.training.checkpointing.chunks",
        ),
        lambda resolved: resolved.example.chunks > 1,
    ),
    Feature(
        "passes in pairs",
        ("megatron.core.pipeline_parallel.combined_1f1b",),
        lambda resolved: resolved.example.chunks > 1,
    ),
    Feature(
        "pipeline segments of hybrid models",
        ("megatron.core.models.hybrid.hybrid_layer_allocation",),
        lambda resolved: True,
    ),
    Feature(
        "a first stage that is not on the first rank",
        (
            "megatron.core.pipeline_parallel.utils",
            "megatron.core.transformer.pipeline_parallel_layer_layout",
            "megatron.core.utils.whole_batches",
            "megatron.core.distributed.finalize_model_grads",
            "megatron.core.dist_checkpointing.strategies.fully_parallel",
            "megatron.core.optimizer.optimizer.saving",
            "megatron.core.models.common.language_module.language_module",
            "megatron.training.models.dist_utils",
            "megatron.training.training.tied_models",
        ),
        lambda resolved: resolved.moves_first_stage,
    ),
    _in_a_folder(ARRANGEMENT_REFUSALS),
    Feature(
        "Megatron's own step, watched",
        ("megatron.core.pipeline_parallel.schedules.stock",),
        None,
        for_settings=lambda config: config.watches_stock,
    ),
    # This feature comes after the feature that moves the first stage. Both wrap one function, and
    # the later wrapper is the outer one, so the ranks are compared before they do anything
    # together.
    Feature(
        "ranks that are launched alike",
        ("megatron.core.parallel_state.agreement",),
        None,
        for_settings=lambda config: config.changes_launch,
    ),
    Feature(
        "the end of what is measured",
        ("megatron.training.training.training_end",),
        None,
        for_settings=lambda config: any(feature.may_be_on(config) for feature in _FINISHING),
    ),
    _in_a_folder(RACE_REFUSALS),
    _in_a_folder(SHARED_PROMPTS_REFUSALS),
    _in_a_folder(VOCABULARY_REFUSALS),
    Feature(
        "slices of sequences",
        (
            "megatron.core.models.gpt.gpt_model.slices",
            "megatron.core.models.common.embeddings.rotary_pos_embedding.slices",
            "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding.slices",
            "megatron.core.transformer.dot_product_attention",
            "megatron.core.transformer.experimental_attention_variant.dsa",
            "megatron.core.extensions.transformer_engine.slices",
            "megatron.core.utils.batches_by_slices",
            "megatron.core.transformer.moe.router",
            "megatron.core.transformer.multi_token_prediction.slices",
        ),
        lambda resolved: True,
        for_settings=lambda config: config.slices > 1,
    ),
    Feature(
        "recomputed passes",
        (
            "megatron.core.transformer.moe.moe_utils",
            "megatron.core.transformer.multi_token_prediction.logging",
        ),
        lambda resolved: True,
        for_settings=lambda config: config.recomputes,
    ),
    _in_a_folder(POST_VALIDATION_REFUSALS),
)


def needed_patches(config: PipelineConfig) -> list[Patch]:
    """Return the patches of all features that ``config`` needs."""
    return [
        patch
        for feature in FEATURES
        if feature.applies_to(config)
        for patch in feature.patches(config)
    ]
