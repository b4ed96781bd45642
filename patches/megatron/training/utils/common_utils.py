"""Reductions in the training loop, which return at once while a step awaits post-validation.

These reductions make ranks agree on whether an optimizer step was taken, on its gradient norm and
on the learning rate. Until post-validation all ranks assume that the step was taken. Every rank
with an optimizer returns its own latest norm and learning rate, rounded as Megatron's reduction
rounds them.

Not patched: other reductions in that file (of losses, within a stage; of norms of parameters, which
is refused).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.config import PipelineConfig
from megatron_ext.features.post_validation.adapter.pending import post_validation
from megatron_ext.patches.engine import Patch, wrap

_UTILS = "megatron.training.utils.common_utils"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches of reductions that do not communicate while a step is unvalidated."""
    return (
        wrap(
            f"{_UTILS}:logical_and_across_model_parallel_group",
            and_at_once,
            reason="whether all ranks took a step is known only after post-validation",
            digests={"0.18": "dceb18ef7f3a", "0.19, 0.20": "62e46fac837c"},
        ),
        wrap(
            f"{_UTILS}:reduce_max_stat_across_model_parallel_group",
            max_at_once,
            reason="the logged gradient norm of a step is known only after post-validation",
            digests={"0.18": "1f9a5b203eae", "0.19, 0.20": "0c5804809646"},
        ),
    )


def and_at_once(original: Callable[..., bool], input: bool, *groups: Any, **named: Any) -> bool:
    """Return ``input`` while a step is unvalidated, else the result of ``original``."""
    return input if post_validation.answers_at_once else original(input, *groups, **named)


def max_at_once(
    original: Callable[..., float | None], stat: float | None, *groups: Any, **named: Any
) -> float | None:
    """Return ``stat`` in fp32 while a step is unvalidated, else the result of ``original``."""
    if not post_validation.answers_at_once:
        return original(stat, *groups, **named)
    return in_single_precision(stat)


def in_single_precision(stat: float | None) -> float | None:
    """Return ``stat`` rounded to fp32, as Megatron's reduction of a statistic rounds it."""
    return None if stat is None else torch.tensor(float(stat), dtype=torch.float32).item()
