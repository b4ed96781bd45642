"""Refusal of rows in which answers share their prompts, for HybridModel.

The model's recurrent layers carry a state from token to token, so an answer would begin with the
state of the answer before it.

Not patched: the layers; Megatron's versions that have no class HybridModel.
"""

from __future__ import annotations

import importlib.util

from megatron_ext.config import PipelineConfig
from megatron_ext.features.shared_prompts.adapter.shared_model_call import refuse_in_hybrid
from megatron_ext.patches.engine import Patch, wrap

_MODULE = "megatron.core.models.hybrid.hybrid_model"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that refuses rows with shared prompts; none if there is no HybridModel."""
    if importlib.util.find_spec(_MODULE) is None:
        return ()
    reason = "its layers carry a state over the answers of a row with shared prompts"
    return (wrap(f"{_MODULE}:HybridModel.forward", refuse_in_hybrid, reason=reason),)
