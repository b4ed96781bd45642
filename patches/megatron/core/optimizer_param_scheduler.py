"""Steps of the learning rate and the weight decay that can be reverted.

Post-validation takes an optimizer step before it knows whether Megatron would skip the step. The
learning rate advances as after a success, and is reverted if the optimizer step was skipped.

Not patched: what the scheduler computes; its steps while no optimizer step is pending.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.config import PipelineConfig
from megatron_ext.features.post_validation.adapter.pending import post_validation
from megatron_ext.features.post_validation.adapter.revertible_lr_step import RevertibleLrStep
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that makes the step of the learning rate revertible."""
    return (
        wrap(
            "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.step",
            step_that_can_be_taken_back,
            reason="post-validation may undo a step that the learning rate has counted",
            signature="(self, increment)",
            digests={"0.18, 0.19, 0.20": "d24c00247740"},
        ),
    )


def step_that_can_be_taken_back(
    original: Callable[..., None], scheduler: Any, increment: int
) -> None:
    """Run ``original``, which advances the learning rate.

    The advance is revertible while post-validation has not decided whether the optimizer step
    stands.
    """
    if post_validation.is_pending:
        step = RevertibleLrStep(scheduler, lambda: original(scheduler, increment))
        post_validation.schedule_step(step)
    else:
        original(scheduler, increment)
