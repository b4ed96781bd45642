"""All messages of a pipeline over its own process group, a batch at a time.

For clusters where a communicator a channel costs too much: not one group is made. What moves
together, and that no rank waits for ever, is the program's affair (`program.graph`); here a batch
is started as soon as its last message is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.runtime.messages.transport import Boundary, TransportBase
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.program.graph import Channel, batches_of
from megatron_ext.schedule.program.verify import Program


class PipelineGroup:
    """A pipeline's own process group, which is not ours."""

    def __init__(self, pipeline: dist.ProcessGroup, device: torch.device) -> None:
        """Collective over the pipeline: NCCL connects on first use, and then wants all ranks."""
        self.rank = pipeline.rank()
        self.device = device
        self.are_closed = False
        self._group = pipeline
        dist.all_reduce(torch.zeros(1, device=device), group=pipeline)

    def close(self) -> None:
        """Take no further step: messages of a broken one are in the group. It stays open, since
        others hold it too; who waits for this rank fails when its process ends."""
        self.are_closed = True

    def start(self, messages: Sequence[tuple[Channel, Tensor]]) -> list[dist.Work]:
        """Start a batch. Returns a work for each message, or (NCCL) one for all."""
        operations = []
        for channel, tensor in messages:
            sends = channel.sender == self.rank
            move, peer = (dist.isend, channel.receiver) if sends else (dist.irecv, channel.sender)
            operations.append(dist.P2POp(move, tensor, group=self._group, group_peer=peer))
        return dist.batch_isend_irecv(operations)


@dataclass(frozen=True)
class _Batch:
    """Messages under way together; ``works`` are those that nobody has waited for yet."""

    actions: tuple[Action, ...]
    works: list[dist.Work]


class BatchedTransport(TransportBase):
    """The messages of one step of a batched program (`P2P.BATCHED`)."""

    def __init__(
        self, group: PipelineGroup, boundary: Boundary, program: Program, recorder: Recorder
    ) -> None:
        super().__init__(group, boundary, program.schedule.placement, recorder)
        row = program.schedule.rows[group.rank]
        self._group = group
        self._last = {row[positions[-1]] for positions in batches_of(row)}
        self._next: list[tuple[Action, Tensor]] = []  # of the batch that is not complete yet
        self._under_way: dict[Action, tuple[_Batch, Tensor]] = {}

    def drain(self) -> None:
        raise AssertionError("no step with batched messages begins again")

    def abandon(self) -> None:
        """Give the step up after an error."""
        self._next.clear()
        self._under_way.clear()
        self._group.close()

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start sending ``tensor``; it must not change or be freed before `wait_sent`."""
        self._add(action, self._data(action, tensor))

    def receive(self, action: Action) -> None:
        """Post the receive of ``action``, at the latest with the send that it moves with."""
        shape = self._boundary.shape_of(action)
        assert shape is not None, "shapes that vary cannot be batched"
        self._add(action, self._empty(shape, self._boundary.dtype))

    def wait_sent(self, send: Action) -> None:
        """Return when the tensor of ``send`` has left, and all that moves with it has moved."""
        batch, _ = self._under_way.pop(send)
        self._wait(batch, send)

    def received(self, action: Action) -> Tensor:
        """The tensor of the posted receive ``action``, when its batch has moved."""
        batch, tensor = self._under_way.pop(action)
        self._wait(batch, action)
        return tensor

    def is_empty(self) -> bool:
        """Whether no message is under way, and none has come that nobody has read."""
        return not self._next and not self._under_way

    def _add(self, action: Action, tensor: Tensor) -> None:
        self._next.append((action, tensor))
        if action not in self._last:
            return
        with self._calling_peer(action):
            works = self._group.start([(self._channel_of(a), data) for a, data in self._next])
        batch = _Batch(tuple(a for a, _ in self._next), works)
        self._under_way |= {a: (batch, data) for a, data in self._next}
        self._next.clear()

    def _wait(self, batch: _Batch, action: Action) -> None:
        """For all of ``batch``. A failure names the message that failed where each has a work, and
        else ``action``, which is wanted."""
        actions = batch.actions if len(batch.works) > 1 else (action,)
        for message, work in zip(actions, batch.works, strict=False):
            with self._calling_peer(message):
                work.wait()
        batch.works.clear()
