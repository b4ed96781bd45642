"""Sampler of a training's microbatches in another order than that of arrival.

Each rank with a loader computes the arrangement of the whole global batch from the dataset's index,
and reads its own part. Ranks that arrange differently would give activations of one microbatch the
labels of another, and the loss would look right. So they compare each arrangement, ahead of its
step, through torch's store.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_ext.runtime.store.leader import store_of_all
from megatron_ext.runtime.store.lost_store import losing_the_store
from megatron_ext.schedule.dealing import Costs, MicrobatchOrder, arranged

_KEYS = 256  # in the store, used in turns; loaders read ahead by far fewer steps


class ArrangedBatches:
    """Iterates over lists of sample numbers, a list per microbatch, as Megatron's sampler does.

    Args:
        sampler: Megatron's sampler, which has the number of consumed samples.
        costs_of: returns the costs of the samples with these numbers.
        order, deal: as in `arranged`.
        calculator: Megatron's calculator of the number of microbatches; it is copied.
    """

    def __init__(
        self,
        sampler: Any,
        costs_of: Callable[[NDArray[np.int64]], Costs],
        order: MicrobatchOrder,
        calculator: Any,
        *,
        deal: bool,
    ) -> None:
        self._sampler = sampler
        self._costs_of = costs_of
        self._order, self._deal = order, deal
        self._calculator = calculator
        self._agreement = _Agreement()

    def __len__(self) -> int:
        own: Sized = self._sampler
        return len(own)

    def __iter__(self) -> Iterator[list[int]]:
        sampler, calculator = self._sampler, copy.deepcopy(self._calculator)
        size, replica = sampler.micro_batch_size, sampler.data_parallel_rank
        replicas = sampler.micro_batch_times_data_parallel_size // size
        consumed: int = sampler.consumed_samples
        while True:
            calculator.update(consumed, consistency_check=False)
            samples = calculator.get() * size * replicas
            if consumed + samples > sampler.total_samples:
                break
            costs = self._costs_of(np.arange(consumed, consumed + samples))
            of_microbatches = costs.reshape(-1, size).sum(axis=1)
            rows = arranged(of_microbatches, replicas, self._order, deal=self._deal)
            self._agreement.check(consumed, rows)
            for number in rows[replica].tolist():
                first = consumed + number * size
                yield list(range(first, first + size))
            consumed += samples
        rest = copy.copy(sampler)  # less than a step, which no training reads
        if consumed < sampler.total_samples:
            rest.consumed_samples = consumed
            yield from rest


class _Agreement:
    """Compares arrangements with those of all other ranks that have a loader."""

    def __init__(self) -> None:
        store = store_of_all() if dist.is_initialized() else None
        self._store = None if store is None else dist.PrefixStore("megatron_ext/batches", store)
        self._before: dict[int, str] = {}  # what this rank has written under each key
        self._number = 0

    def check(self, consumed: int, rows: NDArray[np.intp]) -> None:
        """Raise RuntimeError if another rank arranges the step after ``consumed`` samples
        differently."""
        if self._store is None:
            return
        key = self._number % _KEYS
        digest = hashlib.sha256(rows.tobytes()).hexdigest()[:16]
        own, rank = f"{consumed} {digest}", dist.get_rank()
        with losing_the_store(f"global rank {rank} was to compare the order of its microbatches"):
            found = self._store.compare_set(str(key), self._before.get(key, ""), own).decode()
        if found != own:
            raise RuntimeError(
                f"the ranks order microbatches differently: the step after {consumed} samples is "
                f"{digest} on global rank {rank}, and another rank has {found!r}; start all ranks "
                f"with the same dataset and the same flags"
            )
        self._before[key] = own
        self._number += 1
