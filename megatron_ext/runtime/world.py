"""Communication of all ranks of a job, and the moments at which it is allowed.

Pipelines without common groups may run different shapes and numbers of microbatches at different
steps. A rank that waits for all others at a moment that only its own pipeline reaches would wait
forever. Every pipeline reaches its first step, its first training step, and its n-th training step,
for an n that all ranks know: these functions are called only there. Communication at other moments
goes through torch's store, where no rank waits for others that may not come.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def tell_all[T](value: T) -> T:
    """Return what global rank 0 gave as ``value``. Collective over the world."""
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def gather_from_all[T](value: T) -> list[T]:
    """Return the ``value`` of every rank, by global rank. Collective over the world."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
