"""Numbers of all ranks of a group, exchanged while they go on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class AsyncAllGather:
    """One exchange of ``numbers``, as many on every rank of ``group``. To begin it is collective;
    neither a host nor the stream that computes waits for it.

    ``stream``: of a GPU, for nothing else; None where tensors are the host's.
    """

    def __init__(
        self, group: dist.ProcessGroup, numbers: Sequence[float], stream: torch.cuda.Stream | None
    ) -> None:
        own = torch.tensor(numbers, dtype=torch.float64)
        self._rows = torch.empty(
            group.size(), len(numbers), dtype=torch.float64, pin_memory=stream is not None
        )
        self._work: dist.Work | None = None
        if stream is None:
            self._work = dist.all_gather_into_tensor(
                self._rows.view(-1), own, group=group, async_op=True
            )
            return
        with torch.cuda.stream(stream):
            gathered = torch.empty_like(self._rows, device="cuda")
            own = own.pin_memory().to("cuda", non_blocking=True)
            dist.all_gather_into_tensor(gathered.view(-1), own, group=group)
            self._rows.copy_(gathered, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def has_come(self) -> bool:
        """Whether the numbers of all ranks are here; waits for nothing."""
        return self._work.is_completed() if self._work is not None else self._event.query()

    def wait(self) -> None:
        """Return when they are here: for the end of a training."""
        if self._work is not None:
            self._work.wait()
        else:
            self._event.synchronize()

    def rows(self) -> list[list[float]]:
        """The numbers of each rank, once they `has_come`."""
        rows: list[list[float]] = self._rows.tolist()
        return rows
