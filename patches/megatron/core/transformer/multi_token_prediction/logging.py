"""Losses of multi-token prediction, logged once for a pass that is recomputed.

Megatron logs them in each forward pass of a training, with or without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_ext.adapter.step.checkpointed_forward import checkpointed_forward
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def name_here() -> str:
    """Return the name of Megatron's function that logs multi-token prediction losses."""
    names = "save_metrics_to_tracker", "save_loss_to_tracker"
    return next(name for name in names if hasattr(MTPLossLoggingHelper, name))


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch by which multi-token prediction losses are logged by the recompute only."""
    return (
        wrap(
            f"megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.{name_here()}",
            log_once,
            reason="a recomputed multi-token prediction would log its losses twice",
        ),
    )


def log_once(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run ``original``, which logs losses, unless a recompute will log them
    (`checkpointed_forward`).
    """
    if not checkpointed_forward.is_on:
        original(*args, **kwargs)
