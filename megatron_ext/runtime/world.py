"""Communication of all ranks of a job, and the moments at which it is allowed.

Pipelines without common groups may run different shapes and numbers of microbatches at different
steps. A rank that waits for all others at a moment that only its own pipeline reaches would wait
forever. Every pipeline reaches its first step, its first training step, and its n-th training step,
for an n that all ranks know: these functions are called only there. Communication at other moments
goes through torch's store, where no rank waits for others that may not come.

A rank may be alone: the only one of its job, or one of many that a rehearsal runs without the
others, under torch's fake backend. Only this module distinguishes these cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def is_alone() -> bool:
    """Return whether no other process takes part in this job, as on one rank or in a rehearsal."""
    return dist.get_world_size() == 1 or dist.get_backend() == "fake"


def store_of_all() -> dist.Store | None:
    """Return torch's default store; None without a store (MPI) or without other processes."""
    return None if is_alone() else dist.distributed_c10d._get_default_store()


def told_by_rank_0[T](work: Callable[[], T]) -> T:
    """Return the result of ``work``, which global rank 0 does for all ranks.

    A rank without other processes does it itself. Collective over the world; an error of ``work``
    is raised on all ranks.
    """
    told: list[Any] = [None]
    if dist.get_rank() == 0 or is_alone():
        try:
            told = [work()]
        except Exception as error:
            told = [error]
    if not is_alone():
        dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], Exception):
        raise told[0]
    return told[0]


def gather_from_all[T](value: T) -> list[T]:
    """Return the ``value`` of every rank, by global rank. Collective over the world.

    A rank that runs alone in a rehearsal gets its own value for all ranks. This is right for a
    value that all ranks have in common, and wrong for the sizes of their stages.
    """
    if is_alone():
        return [value] * dist.get_world_size()
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
