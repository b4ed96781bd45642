"""Features of a training, in the order in which their hooks are called.

A step names no feature: it calls the hooks of the features that are on. Only this table lists all
features. Their order matters if several change the same thing, such as the split of a step.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.adapter.pairs.hooks import OverlapHooks
from megatron_ext.adapter.slices.hooks import SlicesHooks
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.adapter.tied import CopiedEmbeddingHooks, MovedFirstStageHooks
from megatron_ext.adapter.transformer_engine.graph_hooks import LayerGraphsHooks, WholeGraphHooks
from megatron_ext.config import PipelineConfig
from megatron_ext.features.arrangement.adapter.hooks import ArrangementHooks
from megatron_ext.features.metrics.adapter.hooks import MetricsHooks
from megatron_ext.features.offload.adapter import OffloadHooks
from megatron_ext.features.post_validation.adapter.hooks import PostValidationHooks
from megatron_ext.features.profile.adapter.hooks import ProfileHooks
from megatron_ext.features.race.adapter.hooks import RaceHooks
from megatron_ext.features.shared_prompts.adapter.hooks import SharedPromptsHooks
from megatron_ext.features.split_report.adapter import SplitReportHooks
from megatron_ext.features.trace.adapter.hooks import TraceHooks
from megatron_ext.features.vocabulary.adapter.hooks import VocabularyHooks

FEATURES: tuple[type[TrainingHooks], ...] = (
    PostValidationHooks,
    SlicesHooks,
    OverlapHooks,
    VocabularyHooks,
    OffloadHooks,
    LayerGraphsHooks,
    WholeGraphHooks,
    ArrangementHooks,
    SharedPromptsHooks,
    SplitReportHooks,
    MetricsHooks,
    TraceHooks,
    ProfileHooks,
    RaceHooks,
    CopiedEmbeddingHooks,
    MovedFirstStageHooks,
)


def features_of(ours: PipelineConfig, settings: Any) -> list[type[TrainingHooks]]:
    """Return the hooks of each feature that a training with these settings has.

    ``ours`` are the settings of megatron_ext; ``settings`` are Megatron's arguments or its config
    of a model.
    """
    return [feature for feature in FEATURES if feature.is_on(ours, settings)]


def requested_options(
    ours: PipelineConfig, settings: Any, microbatches: int | None = None
) -> dict[str, Any]:
    """Return the schedule options that Megatron's settings request for a step, by name.

    Args:
        ours: the settings of megatron_ext.
        settings: Megatron's arguments, or a config.
        microbatches: the number of microbatches of the step; None for all steps of a launch.
    """
    requested: dict[str, Any] = {}
    for feature in features_of(ours, settings):
        requested |= feature.requested_options(settings, microbatches)
    return requested
