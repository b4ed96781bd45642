"""Features of a training, in the order in which their hooks are called."""

from __future__ import annotations

from megatron_ext.adapter.observers.hooks import (
    MetricsHooks,
    ProfileHooks,
    SplitReportHooks,
    TraceHooks,
)
from megatron_ext.adapter.offload.hooks import OffloadHooks
from megatron_ext.adapter.pairs.hooks import OverlapHooks
from megatron_ext.adapter.post_validation.hooks import PostValidationHooks
from megatron_ext.adapter.race.hooks import RaceHooks
from megatron_ext.adapter.slices.hooks import SlicesHooks
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.adapter.transformer_engine.graph_hooks import LayerGraphsHooks
from megatron_ext.adapter.vocabulary.hooks import VocabularyHooks

FEATURES: tuple[type[TrainingHooks], ...] = (
    PostValidationHooks,
    SlicesHooks,
    OverlapHooks,
    VocabularyHooks,
    OffloadHooks,
    LayerGraphsHooks,
    SplitReportHooks,
    MetricsHooks,
    TraceHooks,
    ProfileHooks,
    RaceHooks,
)
