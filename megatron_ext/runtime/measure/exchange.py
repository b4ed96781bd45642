"""Asynchronous exchange of numbers between the ranks of a group.

No step should wait for metrics. So the exchange is started after one step and read after a later
step, when the numbers have long arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class AsyncAllGather:
    """All-gather of a few float64 numbers, for which neither host nor computing stream waits.

    Every rank of ``group`` gives equally many ``numbers``; the start is collective. ``stream`` is a
    GPU's stream used for nothing else; None if tensors are on the CPU.
    """

    def __init__(
        self, group: dist.ProcessGroup, numbers: Sequence[float], stream: torch.cuda.Stream | None
    ) -> None:
        row = torch.tensor(numbers, dtype=torch.float64)
        self._rows = torch.empty(
            group.size(), len(numbers), dtype=torch.float64, pin_memory=stream is not None
        )
        self._work: dist.Work | None = None
        if stream is None:
            self._work = dist.all_gather_into_tensor(
                self._rows.view(-1), row, group=group, async_op=True
            )
            return
        with torch.cuda.stream(stream):
            gathered = torch.empty_like(self._rows, device="cuda")
            row = row.pin_memory().to("cuda", non_blocking=True)
            dist.all_gather_into_tensor(gathered.view(-1), row, group=group)
            self._rows.copy_(gathered, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def has_come(self) -> bool:
        """Return whether the numbers of all ranks have arrived; never waits."""
        return self._work.is_completed() if self._work is not None else self._event.query()

    def wait(self) -> None:
        """Wait until the numbers of all ranks have arrived; called at the end of a training."""
        if self._work is not None:
            self._work.wait()
        else:
            self._event.synchronize()

    def rows(self) -> list[list[float]]:
        """Return the numbers of each rank, after `has_come` is true."""
        return self._rows.tolist()
