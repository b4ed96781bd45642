"""Checkpoints of a 16-bit model's fp32 main parameters if the first stage is not on global rank 0.

Megatron saves data that are no tensors from global rank 0 alone. A parameter group without
parameters on that rank is saved as an empty list, and loading fails on ranks where the group has
tensors. (Embeddings have such a group with --decoupled-lr or Muon, and on a V are on another rank.)

Not patched: loading; the distributed optimizer, which saves no such lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap

_GROUPS = "fp32_from_fp16_params"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that saves no empty parameter groups."""
    return (
        wrap(
            "megatron.core.optimizer.optimizer:"
            "Float16OptimizerWithFloat16Params.sharded_state_dict",
            without_empty_groups,
            reason="a checkpoint that has empty parameter groups of global rank 0 cannot be loaded",
            signature="(self, model_sharded_state_dict, is_loading=False, metadata=None)",
        ),
    )


def without_empty_groups(
    original: Callable[..., dict[str, Any]],
    optimizer: Any,
    model_sharded_state_dict: Any,
    is_loading: bool = False,
    **named: Any,
) -> dict[str, Any]:
    """Run ``original``; if saving, remove the parameter groups without tensors from its result."""
    state = original(optimizer, model_sharded_state_dict, is_loading, **named)
    if not is_loading:
        groups = [group for group in state.pop(_GROUPS) if group]
        if groups:
            state[_GROUPS] = groups
    return state
