"""Megatron's own TensorBoard and W&B writers, which the last global rank has.

Our metrics go to the same writers, at the same interval, so that they stand next to Megatron's.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.adapter.training_globals import training_global


def log_step(
    iteration: int,
    *,
    bubble_shares: tuple[float | None, float],
    seconds: tuple[float | None, float],
    more: Mapping[str, float] | None = None,
) -> None:
    """Write a step's metrics to Megatron's TensorBoard and W&B writers, as far as they exist.

    Args:
        bubble_shares, seconds: the step's bubble share and duration, each as (predicted, measured).
            A predicted one is None if there is no estimate.
        more: further metrics by name.
    """
    figures: dict[str, float] = {}
    for name, (predicted, measured) in (
        ("pipeline/bubble share", bubble_shares),
        ("pipeline/step seconds", seconds),
    ):
        figures[name] = measured
        if predicted is not None:
            figures[f"{name}, predicted"] = predicted
    figures |= more or {}
    tensorboard = training_global("_GLOBAL_TENSORBOARD_WRITER")
    wandb = training_global("_GLOBAL_WANDB_WRITER")
    if tensorboard is not None:
        for name, figure in figures.items():
            tensorboard.add_scalar(name, figure, iteration)
    if wandb is not None:
        wandb.log(figures, iteration)
