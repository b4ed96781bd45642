"""Condition under which a launch may share prompts between answers, and the patches for that."""

from __future__ import annotations

from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals
from megatron_ext.features.shared_prompts.settings import SharedPrompts

SHARED_PROMPTS_REFUSALS = FeatureRefusals(
    may_be_on=lambda config: config.shared_prompts is not SharedPrompts.NONE,
    name="prompts that answers share",
    patches=(
        "megatron.core.models.gpt.gpt_model.shared_prompts",
        "megatron.core.models.hybrid.hybrid_model",
        "megatron.core.models.common.embeddings.rotary_pos_embedding.shared_prompts",
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding.shared_prompts",
        "megatron.core.extensions.transformer_engine.shared_prompts",
    ),
)
