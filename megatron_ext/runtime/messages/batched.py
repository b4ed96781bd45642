"""Messages of a pipeline over its own process group, in batches.

This transport is for clusters where one communicator per channel costs too much: it creates no
group. The program determines the batches and proves that they do not deadlock (`program.graph`).
Here a batch starts as soon as its last message is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.compile.program.graph import Channel, batches_of
from megatron_ext.compile.program.verify import Program
from megatron_ext.runtime.messages.connecting import connecting
from megatron_ext.runtime.messages.transport import Boundary, TransportBase
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.action import Action


class PipelineGroup:
    """Process group of a pipeline, created by Megatron, for messages that are sent in batches."""

    def __init__(
        self,
        pipeline: dist.ProcessGroup,
        device: torch.device,
        recorder: Recorder | None = None,
    ) -> None:
        """Connect the group. Collective over the pipeline: NCCL connects on first use by all ranks.

        ``recorder`` as for `Channels`.
        """
        self.rank = pipeline.rank()
        self.device = device
        self.are_closed = False
        self._group = pipeline
        recorder = recorder or Recorder(self.rank)
        recorder.add_connection(self)
        with connecting(recorder, pipeline, "of the pipeline"):
            dist.all_reduce(torch.zeros(1, device=device), group=pipeline)

    def close(self) -> None:
        """Refuse further steps, because the group contains messages of a failed step.

        The group stays open, since other code uses it too; ranks that wait for this one fail when
        its process ends.
        """
        self.are_closed = True

    def start(self, messages: Sequence[tuple[Channel, Tensor]]) -> list[dist.Work]:
        """Start a batch of messages; return a work for each message, or (on NCCL) one for all."""
        operations = []
        for channel, tensor in messages:
            sends = channel.sender == self.rank
            move, peer = (dist.isend, channel.receiver) if sends else (dist.irecv, channel.sender)
            operations.append(dist.P2POp(move, tensor, group=self._group, group_peer=peer))
        return dist.batch_isend_irecv(operations)


@dataclass(frozen=True)
class _Batch:
    """Messages that are in flight together; ``works`` are those for which no wait has ended."""

    actions: tuple[Action, ...]
    works: list[dist.Work]


class BatchedTransport(TransportBase):
    """Transport of one step's messages if the program sends them in batches (`P2P.BATCHED`)."""

    def __init__(
        self, group: PipelineGroup, boundary: Boundary, program: Program, recorder: Recorder
    ) -> None:
        super().__init__(group, boundary, program.schedule.placement, recorder)
        row = program.schedule.rows[group.rank]
        self._group = group
        self._last = {row[positions[-1]] for positions in batches_of(row)}
        # Messages of the next batch, which is sent once it is complete.
        self._next: list[tuple[Action, Tensor]] = []
        self._in_flight: dict[Action, tuple[_Batch, Tensor]] = {}

    def drain(self) -> None:
        raise AssertionError("a step that sends its messages in batches is never restarted")

    def abandon(self) -> None:
        """End the step after an error; Megatron's process group stays open."""
        self._next.clear()
        self._in_flight.clear()
        self._group.close()

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start sending ``tensor``; it must not change or be freed before `wait_sent`."""
        self._add(action, self._data(action, tensor))

    def receive(self, action: Action) -> None:
        """Queue the receive of ``action``; it is posted with the last message of its batch."""
        shape = self._boundary.shape_of(action)
        assert shape is not None, "shapes that vary cannot be batched"
        self._add(action, self._empty(shape, self._boundary.dtype))

    def wait_sent(self, send: Action) -> None:
        """Wait until the batch with the message ``send`` has been transferred."""
        batch, _ = self._in_flight.pop(send)
        self._wait(batch, send)

    def received(self, action: Action) -> Tensor:
        """Return the tensor of the posted receive ``action``, once its batch has arrived."""
        batch, tensor = self._in_flight.pop(action)
        self._wait(batch, action)
        return tensor

    def is_empty(self) -> bool:
        """Return whether no message is in flight, or received but not read."""
        return not self._next and not self._in_flight

    def _add(self, action: Action, tensor: Tensor) -> None:
        self._next.append((action, tensor))
        if action not in self._last:
            return
        with self._calling_peer(action):
            works = self._group.start([(self._channel_of(a), data) for a, data in self._next])
        batch = _Batch(tuple(a for a, _ in self._next), works)
        self._in_flight |= {a: (batch, data) for a, data in self._next}
        self._next.clear()

    def _wait(self, batch: _Batch, action: Action) -> None:
        """Wait for all messages of ``batch``.

        A failure names the message that failed if each message has its own work, and otherwise
        ``action``, which is needed now.
        """
        actions = batch.actions if len(batch.works) > 1 else (action,)
        for message, work in zip(actions, batch.works, strict=False):
            with self._calling_peer(message):
                work.wait()
        batch.works.clear()
