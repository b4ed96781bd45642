"""Scheduler of learning rate and weight decay: it steps before the verdict, as after a success, and
is reverted if the optimizer's step turns out to have been skipped.

Not patched: what it computes; steps while no verdict is pending.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.config import PipelineConfig
from megatron_ext.features.post_validation.adapter.pending import post_validation
from megatron_ext.features.post_validation.adapter.revertible_lr_step import RevertibleLrStep
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that remembers a learning-rate step that may be reverted."""
    return (
        wrap(
            "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.step",
            step_that_can_be_taken_back,
            reason="post-validation may find later that a counted step was skipped",
            signature="(self, increment)",
            digests={"0.18, 0.19, 0.20": "d24c00247740"},
        ),
    )


def step_that_can_be_taken_back(
    original: Callable[..., None], scheduler: Any, increment: int
) -> None:
    """Run ``original``, revertibly if a verdict is pending."""
    if post_validation.is_pending:
        step = RevertibleLrStep(scheduler, lambda: original(scheduler, increment))
        post_validation.schedule_step(step)
    else:
        original(scheduler, increment)
