"""Megatron's own TensorBoard and W&B writers, which the last global rank has.

Our figures go to the same writers, at the same interval, so that they stand next to Megatron's.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.adapter.training_globals import training_global


def log_step(
    iteration: int,
    *,
    bubble_shares: tuple[float, float],
    seconds: tuple[float, float],
    more: Mapping[str, float] | None = None,
) -> None:
    """Write a step's bubble share and seconds, each as (predicted, measured), and the figures in
    ``more`` by name, to the writers that exist."""
    figures: dict[str, float] = {}
    for name, (predicted, measured) in (
        ("pipeline/bubble share", bubble_shares),
        ("pipeline/step seconds", seconds),
    ):
        figures |= {name: measured, f"{name}, predicted": predicted}
    figures |= more or {}
    tensorboard = training_global("_GLOBAL_TENSORBOARD_WRITER")
    wandb = training_global("_GLOBAL_WANDB_WRITER")
    if tensorboard is not None:
        for name, figure in figures.items():
            tensorboard.add_scalar(name, figure, iteration)
    if wandb is not None:
        wandb.log(figures, iteration)
