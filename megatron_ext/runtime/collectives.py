"""What all ranks of a pipeline do together, over torch.distributed.

Each kind has a process group of its own, made and used once in one global order before the first
step, as channels have (`transport`). Collectives are started in passing and waited for by whoever
needs what they bring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.runtime.closing import close_groups
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.transport import Dealing, check_open, make_groups
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES, Lane

_KINDS = sorted(kind for kind, rule in RULES.items() if rule.lane is Lane.COLLECTIVE)


class Collectives:
    """The process groups of a pipeline's collectives, over all steps."""

    def __init__(self, pipeline: dist.ProcessGroup, device: torch.device) -> None:
        """Collective over the world, as torch.distributed.new_group is: every rank of every
        pipeline calls it."""
        self.rank = pipeline.rank()
        self.device = device
        self.are_closed = False
        self._global_ranks = dist.get_process_group_ranks(pipeline)
        self.ranks = pipeline.size()
        self._groups = make_groups(pipeline, dict.fromkeys(_KINDS, range(self.ranks)))
        for group in self._groups.values():
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def close(self) -> None:
        """Cut the connections, as `Channels.close` does."""
        if self._groups:
            self.are_closed = True
        close_groups(self._groups)

    def broadcast(self, kind: Kind, tensor: Tensor, root: int) -> dist.Work:
        work = dist.broadcast(
            tensor, self._global_ranks[root], group=self._groups[kind], async_op=True
        )
        assert work is not None
        return work

    def sum(self, kind: Kind, tensor: Tensor, root: int) -> dist.Work:
        """In place on ``root``; elsewhere ``tensor`` is spoilt."""
        work = dist.reduce(
            tensor, self._global_ranks[root], group=self._groups[kind], async_op=True
        )
        assert work is not None
        return work

    def gather(self, kind: Kind, gathered: Tensor, tensor: Tensor) -> dist.Work:
        """``tensor`` of every rank into ``gathered``, in rank order."""
        work = dist.all_gather_into_tensor(
            gathered, tensor, group=self._groups[kind], async_op=True
        )
        assert work is not None
        return work


class Exchange:
    """The collectives of one step, by their actions."""

    def __init__(self, collectives: Collectives, recorder: Recorder) -> None:
        check_open(collectives)
        self.rank = collectives.rank
        self.device = collectives.device
        self._collectives = collectives
        self._recorder = recorder
        # Works of an action, and the tensors that must stay until these have ended.
        self._coming: dict[Action, tuple[list[dist.Work], list[Tensor], int]] = {}
        self._leaving: dict[Action, tuple[list[dist.Work], list[Tensor], int]] = {}

    def broadcast(self, action: Action, tensors: Sequence[Tensor], root: int) -> None:
        """Start to bring all ranks the ``tensors`` of ``root``; those of others are filled."""
        tensors = list(tensors)
        with self._dealing_with_all(action, root):
            works = [self._collectives.broadcast(action.kind, t, root) for t in tensors]
        if self.rank == root:
            self._leave(action, works, tensors, root)
            works = []
        self._coming[action] = works, tensors, root

    def sum(self, action: Action, tensor: Tensor, root: int) -> None:
        """Start to sum ``tensor`` over all ranks for ``root``, which alone may ask for it."""
        with self._dealing_with_all(action, root):
            works = [self._collectives.sum(action.kind, tensor, root)]
        if self.rank == root:
            self._coming[action] = works, [tensor], root
        else:
            self._leave(action, works, [tensor], root)

    def gather(self, action: Action, tensor: Tensor, is_wanted: bool) -> None:
        """Start to bring every rank ``tensor`` of all, stacked in rank order.

        ``is_wanted``: whether this rank will ask for it.
        """
        size = self._collectives.ranks
        gathered = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
        with self._dealing_with_all(action, 0):
            works = [self._collectives.gather(action.kind, gathered, tensor)]
        if is_wanted:
            stacked = gathered.view(size, *tensor.shape)
            self._coming[action] = works, [stacked, tensor], 0
        else:
            self._leave(action, works, [gathered, tensor], 0)

    def result(self, action: Action) -> list[Tensor]:
        """What ``action`` has brought this rank, once it is there. Nothing of it is kept."""
        works, tensors, root = self._coming.pop(action)
        self._wait(action, works, root)
        return tensors

    def finish(self) -> None:
        """Return when all has gone."""
        for action in list(self._leaving):
            works, _, root = self._leaving[action]
            self._wait(action, works, root)
            del self._leaving[action]
        assert not self._coming

    def abandon(self) -> None:
        """Give the step up; see `Transport.abandon`."""
        self._coming.clear()
        self._leaving.clear()
        self._collectives.close()

    def _leave(
        self, action: Action, works: list[dist.Work], tensors: list[Tensor], root: int
    ) -> None:
        for other in list(self._leaving):
            going, _, its_root = self._leaving[other]
            if all(work.is_completed() for work in going):
                self._wait(other, going, its_root)  # raises if it has failed
                del self._leaving[other]
        self._leaving[action] = works, tensors, root

    def _wait(self, action: Action, works: list[dist.Work], root: int) -> None:
        with self._dealing_with_all(action, root):
            for work in works:
                work.wait()

    def _dealing_with_all(self, action: Action, root: int) -> Dealing:
        return Dealing(self._recorder, action, root, "with")
