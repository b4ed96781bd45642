"""Sampler of a training's microbatches in another order than that of arrival.

Each rank with a loader computes the arrangement of the whole global batch from the dataset's index,
and reads its own part. Ranks that arrange differently would give activations of one microbatch the
labels of another, and the loss would look right. So they compare each arrangement, ahead of its
step, through torch's store.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import num_microbatches_calculator
from numpy.typing import NDArray

from megatron_ext.config import PipelineConfig
from megatron_ext.features.arrangement.adapter.document_lengths import (
    is_packed,
    packed_squares,
    squared_lengths,
)
from megatron_ext.features.arrangement.adapter.sample_weights import SampleWeights
from megatron_ext.runtime.store.lost_store import losing_the_store
from megatron_ext.runtime.world import store_of_all
from megatron_ext.schedule.dealing import MicrobatchCosts, MicrobatchOrder, arranged

# Number of keys in the store, which are used in turn; loaders read ahead by fewer steps.
_KEYS = 256


def arrange_loader(loader: Any, dataset: Any, config: PipelineConfig) -> None:
    """Replace the sampler of ``loader`` by one that orders and deals microbatches by cost.

    No iteration over ``loader`` may have begun. Its sampler is Megatron's, or Megatron-Bridge's
    sampler of whole steps.
    """
    sampler, file = loader.batch_sampler, config.microbatch_weights
    costs_of: Callable[[NDArray[np.int64]], MicrobatchCosts]
    if file is not None:
        costs_of = SampleWeights(file, sampler.total_samples)
    else:
        costs_of = partial(packed_squares if is_packed(dataset) else squared_lengths, dataset)
    batches: ArrangedBatches | ArrangedSteps
    if hasattr(sampler, "_global_batch_size"):
        batches = ArrangedSteps(
            sampler, costs_of, config.microbatch_order, deal=config.deal_microbatches
        )
    else:
        batches = ArrangedBatches(
            sampler,
            costs_of,
            config.microbatch_order,
            num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR,
            deal=config.deal_microbatches,
        )
    # The attribute is set past torch's check, as torch refuses to change a loader's batch sampler.
    object.__setattr__(loader, "batch_sampler", batches)


class _ArrangedSampler:
    """Sampler of a data loader whose microbatches are ordered and dealt to replicas by their costs.

    Args:
        sampler: Megatron's or Megatron-Bridge's sampler, which has the number of consumed samples.
        costs_of: returns the costs of the samples with these numbers.
        order, deal: as in `arranged`.
    """

    def __init__(
        self,
        sampler: Any,
        costs_of: Callable[[NDArray[np.int64]], MicrobatchCosts],
        order: MicrobatchOrder,
        *,
        deal: bool,
    ) -> None:
        self._sampler = sampler
        self._costs_of = costs_of
        self._order, self._deal = order, deal
        self._agreement = _Agreement()

    def __len__(self) -> int:
        return len(self._sampler)

    def _rows(
        self, samples: NDArray[np.int64], size: int, replicas: int, consumed: int
    ) -> NDArray[np.intp]:
        """Return the microbatches of each replica, a row of their numbers per replica.

        Args:
            samples: the samples of one step, for all replicas.
            size: samples of a microbatch.
            consumed: samples consumed before this step.
        """
        costs = self._costs_of(samples).reshape(-1, size).sum(axis=1)
        rows = arranged(costs, replicas, self._order, deal=self._deal)
        self._agreement.check(consumed, rows)
        return rows


class ArrangedBatches(_ArrangedSampler):
    """Iterable over lists of sample numbers, a list per microbatch, like Megatron's sampler.

    ``calculator`` is Megatron's calculator of the number of microbatches; it is copied.
    """

    def __init__(
        self,
        sampler: Any,
        costs_of: Callable[[NDArray[np.int64]], MicrobatchCosts],
        order: MicrobatchOrder,
        calculator: Any,
        *,
        deal: bool,
    ) -> None:
        super().__init__(sampler, costs_of, order, deal=deal)
        self._calculator = calculator

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
            rows = self._rows(np.arange(consumed, consumed + samples), size, replicas, consumed)
            for number in rows[replica].tolist():
                first = consumed + number * size
                yield list(range(first, first + size))
            consumed += samples
        # The samples left are fewer than those of a step, and no training reads them.
        rest = copy.copy(sampler)
        if consumed < sampler.total_samples:
            rest.consumed_samples = consumed
            yield from rest


class ArrangedSteps(_ArrangedSampler):
    """Iterable over lists of sample numbers, a list per step, like Megatron-Bridge's sampler.

    Bridge's sampler shuffles by epochs and counts the samples that it yields. The last step of an
    epoch is not reordered if it is not full.
    """

    def __iter__(self) -> Iterator[list[int]]:
        sampler, replicas = self._sampler, self._sampler.data_parallel_size
        of_all = [copy.copy(sampler) for _ in range(replicas)]
        for replica, one in enumerate(of_all):
            one.data_parallel_rank = replica
        consumed: int = sampler.consumed_samples
        for batch, *step in zip(sampler, *of_all, strict=True):
            is_full = len({len(one) for one in step}) == 1 and min(map(min, step)) >= 0
            if is_full and replicas * len(batch) == sampler._global_batch_size:
                yield self._arranged(np.array(step), consumed)
            else:
                yield batch
            consumed = sampler.consumed_samples

    def _arranged(self, step: NDArray[np.int64], consumed: int) -> list[int]:
        """Return the samples of this replica.

        ``step`` has those of all replicas, a row for each.
        """
        replicas, size = len(step), self._sampler.micro_batch_size
        microbatches = step.reshape(replicas, -1, size).swapaxes(0, 1).reshape(-1, size)
        rows = self._rows(microbatches.ravel(), size, replicas, consumed)
        return microbatches[rows[self._sampler.data_parallel_rank]].ravel().tolist()


class _Agreement:
    """Comparison of the order of microbatches on all ranks that have a loader."""

    def __init__(self) -> None:
        store = store_of_all() if dist.is_initialized() else None
        self._store = None if store is None else dist.PrefixStore("megatron_ext/batches", store)
        self._before: dict[int, str] = {}  # latest value that this rank has written under each key
        self._number = 0

    def check(self, consumed: int, rows: NDArray[np.intp]) -> None:
        """Raise RuntimeError if ranks differ in the order of a step.

        The step is the one after ``consumed`` samples.
        """
        if self._store is None:
            return
        key = self._number % _KEYS
        digest = hashlib.sha256(rows.tobytes()).hexdigest()[:16]
        entry, rank = f"{consumed} {digest}", dist.get_rank()
        with losing_the_store(f"global rank {rank} was to compare the order of its microbatches"):
            found = self._store.compare_set(str(key), self._before.get(key, ""), entry).decode()
        if found != entry:
            raise RuntimeError(
                "the data-parallel ranks order microbatches differently: for the step after "
                f"{consumed} samples the order's digest is {digest} on global rank {rank}, and "
                f"{found!r} on another rank; start all ranks with the same dataset and the same "
                "flags"
            )
        self._before[key] = entry
        self._number += 1
