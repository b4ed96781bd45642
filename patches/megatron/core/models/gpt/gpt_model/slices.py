"""A GPTModel that is called with a whole batch runs a slice of its sequences.

Not patched: how the batch is made, which callers do as ever; the layers, which know nothing of
sequences but in attention and positions, patched where those are; `_postprocess`, whose losses are
a slice's, token by token.
"""

from __future__ import annotations

from megatron_ext.adapter.slices.model_call import call_with_slice
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch that gives the model the part of a batch that a pass is about."""
    return (
        wrap(
            "megatron.core.models.gpt.gpt_model:GPTModel.forward",
            call_with_slice,
            reason="a pass runs a slice of the batch that its caller has",
        ),
    )
