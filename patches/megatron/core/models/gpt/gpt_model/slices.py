"""GPTModel that is called with a whole batch and runs one slice of its sequences.

Not patched: how callers make the batch; the layers, which depend on sequences only in attention and
positions, patched in their own files; `_postprocess`, which computes the slice's losses token by
token.
"""

from __future__ import annotations

from megatron_ext.adapter.slices.model_call import call_with_slice
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch by which a GPTModel runs one slice of the sequences in its batch."""
    return (
        wrap(
            "megatron.core.models.gpt.gpt_model:GPTModel.forward",
            call_with_slice,
            reason="a pass runs one slice of the batch that the caller passes",
        ),
    )
