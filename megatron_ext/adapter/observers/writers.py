"""Megatron's own TensorBoard and W&B writers, which the last global rank has."""

from __future__ import annotations

import sys
from typing import Any


def current_iteration() -> int | None:
    """The iteration as Megatron's log will count it; None where its training loop does not run."""
    iteration: int | None = getattr(_training_global("_GLOBAL_ARGS"), "curr_iteration", None)
    return None if iteration is None else iteration + 1


def log_interval() -> int:
    """The interval, in iterations, at which Megatron writes its log."""
    return getattr(_training_global("_GLOBAL_ARGS"), "tensorboard_log_interval", 1)


def log_step(
    iteration: int, *, bubble_shares: tuple[float, float], seconds: tuple[float, float]
) -> None:
    """Write a step's bubble share and its seconds, each as (predicted, measured), to each of the
    writers that exist."""
    figures: dict[str, float] = {}
    for name, (predicted, measured) in (
        ("pipeline/bubble share", bubble_shares),
        ("pipeline/step seconds", seconds),
    ):
        figures |= {name: measured, f"{name}, predicted": predicted}
    tensorboard = _training_global("_GLOBAL_TENSORBOARD_WRITER")
    wandb = _training_global("_GLOBAL_WANDB_WRITER")
    if tensorboard is not None:
        for name, figure in figures.items():
            tensorboard.add_scalar(name, figure, iteration)
    if wandb is not None:
        wandb.log(figures, iteration)


def _training_global(name: str) -> Any:
    """A global variable of Megatron's training; None where that is not imported or initialised."""
    return getattr(sys.modules.get("megatron.training.global_vars"), name, None)
