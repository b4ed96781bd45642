"""Choice of experts in a checkpointed forward, equal to that of the recompute.

If gradients are disabled, Megatron leaves a token's experts unsorted, so sums of their scores could
differ from the recompute's in the last bit. The patch enables gradients for the choice of experts;
the logits need none, so nothing is added to the graph.

Not patched: routers, which count tokens and auxiliary losses only with gradients, so not in a
checkpointed forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.adapter.step.checkpointed_forward import checkpointed_forward
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that sorts a token's experts in the forward pass of a recompute."""
    return (
        wrap(
            "megatron.core.transformer.moe.moe_utils:topk_routing_with_score_function",
            sort_experts,
            reason="a recomputed pass must choose the same experts as its forward pass",
        ),
    )


def sort_experts(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``original``, which chooses experts; in a checkpointed forward enable gradients for it.

    Megatron sorts the chosen experts only if gradients are enabled.
    """
    if not checkpointed_forward.is_on:
        return original(*args, **kwargs)
    with torch.enable_grad():
        return original(*args, **kwargs)
