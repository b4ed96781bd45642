"""Hooks of prompts that answers share."""

from __future__ import annotations

from typing import Any, override

from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.config import PipelineConfig
from megatron_ext.features.shared_prompts.adapter.refused_settings import refuse_settings
from megatron_ext.features.shared_prompts.refusals import SHARED_PROMPTS_REFUSALS


class SharedPromptsHooks(TrainingHooks):
    """Hooks that check launches whose callers may describe prompts that several answers share.

    Passes do not change.
    """

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return SHARED_PROMPTS_REFUSALS.may_be_on(ours)

    @override
    @classmethod
    def check_arguments(cls, args: Any, ours: PipelineConfig) -> None:
        refuse_settings(args, ours.shared_prompts)
