"""Collectives of a pipeline over torch.distributed.

Each kind has a process group of its own, created and used once in one global order before the first
step, like channels (`channels`). An action starts a collective without waiting; the pass that needs
its result waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.compile.program.communicators import COLLECTIVES
from megatron_ext.runtime.messages.closing import close_groups
from megatron_ext.runtime.messages.connecting import connecting
from megatron_ext.runtime.messages.groups import make_device_groups
from megatron_ext.runtime.messages.peer_call import PeerCall
from megatron_ext.runtime.messages.transport import check_open
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.action import Action, Kind


class Collectives:
    """Process groups of a pipeline's collectives (vocabulary parallelism), used in all steps."""

    def __init__(
        self,
        pipeline: dist.ProcessGroup,
        device: torch.device,
        max_ctas: int | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Create the groups, one for each kind of collective. Collective over the pipeline.

        ``max_ctas`` and ``recorder`` as for `Channels`.
        """
        self.rank = pipeline.rank()
        self.device = device
        self.are_closed = False
        self._global_ranks = dist.get_process_group_ranks(pipeline)
        self.ranks = pipeline.size()
        self._groups: dict[Kind, dist.ProcessGroup] = {}
        recorder = recorder or Recorder(self.rank)
        recorder.add_connection(self)
        for kind in COLLECTIVES:
            with connecting(recorder, pipeline, str(kind)):
                members = {kind: range(self.ranks)}
                self._groups |= make_device_groups(pipeline, members, device, max_ctas)
                dist.all_reduce(torch.zeros(1, device=device), group=self._groups[kind])

    def close(self) -> None:
        """Cut the connections, as `Channels.close` does."""
        if self._groups:
            self.are_closed = True
        close_groups(self._groups)

    def broadcast(self, kind: Kind, tensors: Sequence[Tensor], root: int) -> list[dist.Work]:
        """Start to broadcast ``tensors`` of ``root``, and return a work for each."""
        works = []
        for tensor in tensors:
            work = dist.broadcast(
                tensor, self._global_ranks[root], group=self._groups[kind], async_op=True
            )
            assert work is not None
            works.append(work)
        return works

    def sum(self, kind: Kind, tensor: Tensor, root: int) -> dist.Work:
        """Start to sum ``tensor`` of all ranks in place on ``root``.

        On other ranks ``tensor`` is undefined afterwards.
        """
        work = dist.reduce(
            tensor, self._global_ranks[root], group=self._groups[kind], async_op=True
        )
        assert work is not None
        return work

    def gather(self, kind: Kind, gathered: Tensor, tensor: Tensor) -> dist.Work:
        """Start to gather ``tensor`` of every rank into ``gathered``, in rank order."""
        work = dist.all_gather_into_tensor(
            gathered, tensor, group=self._groups[kind], async_op=True
        )
        assert work is not None
        return work


class StepCollectives:
    """Collectives of one step, each started and awaited by its action."""

    def __init__(self, collectives: Collectives, recorder: Recorder) -> None:
        check_open(collectives)
        self.rank = collectives.rank
        self.device = collectives.device
        self._collectives = collectives
        self._recorder = recorder
        # For each posted collective: its works, the tensors that must stay alive until the works
        # have ended, and the root rank.
        self._in_flight: dict[Action, tuple[list[dist.Work], list[Tensor], int]] = {}

    def broadcast(self, action: Action, tensors: Sequence[Tensor], root: int) -> None:
        """Start to broadcast the ``tensors`` of ``root`` over those of the other ranks."""
        tensors = list(tensors)
        with self._calling_all(action, root):
            works = self._collectives.broadcast(action.kind, tensors, root)
        self._in_flight[action] = works, tensors, root

    def sum(self, action: Action, tensor: Tensor, root: int) -> None:
        """Start to sum ``tensor`` over all ranks, in place on ``root``.

        On other ranks ``tensor`` is only an input.
        """
        with self._calling_all(action, root):
            works = [self._collectives.sum(action.kind, tensor, root)]
        self._in_flight[action] = works, [tensor], root

    def gather(self, action: Action, tensor: Tensor) -> None:
        """Start to gather ``tensor`` of all ranks on every rank, stacked in rank order."""
        size = self._collectives.ranks
        gathered = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
        with self._calling_all(action, 0):
            works = [self._collectives.gather(action.kind, gathered, tensor)]
        self._in_flight[action] = works, [gathered.view(size, *tensor.shape), tensor], 0

    def result(self, action: Action) -> list[Tensor]:
        """Wait for the collective ``action``, return its tensors on this rank, and forget them."""
        works, tensors, root = self._in_flight.pop(action)
        with self._calling_all(action, root):
            for work in works:
                work.wait()
        return tensors

    def finish(self) -> None:
        """Assert after the last action that all collectives have ended."""
        assert not self._in_flight

    def abandon(self) -> None:
        """End the step after an error, and cut the connections; see `Transport.abandon`."""
        self._in_flight.clear()
        self._collectives.close()

    def _calling_all(self, action: Action, root: int) -> PeerCall:
        return PeerCall(self._recorder, action, root, "with")
