"""Times of all pipelines of a training, exchanged through torch's store.

No rank waits for another: each pipeline writes its latest times, and one rank reads what is there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch.distributed as dist

from megatron_ext.observe.slow_ranks import PipelineTimes
from megatron_ext.runtime.world import store_of_all

_PREFIX = "megatron_ext/pipelines"


class Pipelines:
    """Latest times of all pipelines of a training, exchanged through torch's store.

    If the store is lost, the exchange stops quietly, since metrics are no reason to end a training.
    """

    def __init__(self) -> None:
        store = store_of_all()
        self._store = None if store is None else dist.PrefixStore(_PREFIX, store)
        self._number: int | None = None  # number of the rank's own pipeline, from 1 on

    def publish(self, busy: Sequence[float]) -> None:
        """Write the seconds of passes of this rank's pipeline, by pipeline rank.

        Called by the last rank of the pipeline.
        """
        if self._store is None:
            return
        try:
            if self._number is None:
                self._number = self._store.add("count", 1)
            times = {"last": dist.get_rank(), "busy": list(busy)}
            self._store.set(f"times/{self._number}", json.dumps(times))
        except (RuntimeError, dist.DistError):
            self._store = None

    def others(self) -> list[PipelineTimes]:
        """Return the latest times of the other pipelines that have published some."""
        if self._store is None:
            return []
        found = []
        try:
            for number in range(1, self._store.add("count", 0) + 1):
                key = f"times/{number}"
                if number != self._number and self._store.check([key]):
                    times = json.loads(self._store.get(key))
                    found.append(PipelineTimes(times["last"], tuple(times["busy"])))
        except (RuntimeError, dist.DistError):
            self._store = None
        return found
