"""Made-up peers of a rehearsed rank: messages arrive as `Values`, at their `MessageTimes`.

They stand in for the connections of `runtime.messages`. Transports, stages and the executor do not
know the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.compile.program.graph import Channel
from megatron_ext.rehearsal.message_times import MessageTimes
from megatron_ext.rehearsal.request import BACKWARD, FORWARD
from megatron_ext.rehearsal.values import Values
from megatron_ext.runtime.messages.batched import PipelineGroup
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.collectives import Collectives
from megatron_ext.runtime.messages.peers import Peers
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.action import Kind


def rehearsed_peers(values: Values, times: MessageTimes, vocabulary: Callable[[], int]) -> Peers:
    """Return made-up peers that send ``values`` and tokens of the ``vocabulary`` at ``times``."""
    return Peers(
        partial(RehearsedChannels, values, times),
        partial(RehearsedGroup, values, times),
        partial(RehearsedCollectives, values, times, vocabulary),
    )


class RehearsedChannels(Channels):
    """Channels to made-up peers: messages get made-up values, and no other process is needed."""

    def __init__(
        self,
        values: Values,
        times: MessageTimes,
        pipeline: dist.ProcessGroup,
        channels: Iterable[Channel],
        device: torch.device,
        max_ctas: int | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.rank, self.device, self.are_closed = pipeline.rank(), device, False
        self._values, self._times, self._max_ctas = values, times, max_ctas

    def connect_hosts(self) -> None:
        raise ValueError(
            "microbatches of varying lengths cannot be rehearsed, since a rank learns the "
            "lengths from other ranks; set variable_seq_lengths=False in the model's config"
        )

    def close(self) -> None:
        self.are_closed = True

    def send(self, channel: Channel, tensor: Tensor) -> dist.Work:
        self._values.note(_direction(channel), tensor)
        return self._times.post([str(channel)], self._max_ctas)

    def receive(self, channel: Channel, tensor: Tensor) -> dist.Work:
        self._values.fill(_direction(channel), tensor)
        return self._times.post([str(channel)], self._max_ctas)


class RehearsedGroup(PipelineGroup):
    """Process group of a pipeline whose other ranks are made up."""

    def __init__(
        self,
        values: Values,
        times: MessageTimes,
        pipeline: dist.ProcessGroup,
        device: torch.device,
        recorder: Recorder | None = None,
    ) -> None:
        self.rank, self.device, self.are_closed = pipeline.rank(), device, False
        self._values, self._times = values, times

    def start(self, messages: Sequence[tuple[Channel, Tensor]]) -> list[dist.Work]:
        for channel, tensor in messages:
            act = self._values.note if channel.sender == self.rank else self._values.fill
            act(_direction(channel), tensor)
        return [self._times.post([str(channel) for channel, _ in messages])]


class RehearsedCollectives(Collectives):
    """Collectives of the partitioned vocabulary whose other ranks are made up."""

    def __init__(
        self,
        values: Values,
        times: MessageTimes,
        vocabulary: Callable[[], int],
        pipeline: dist.ProcessGroup,
        device: torch.device,
        max_ctas: int | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.rank, self.device, self.are_closed = pipeline.rank(), device, False
        self.ranks = pipeline.size()
        self._values, self._times, self._max_ctas = values, times, max_ctas
        self._vocabulary = vocabulary()

    def close(self) -> None:
        self.are_closed = True

    def broadcast(self, kind: Kind, tensors: Sequence[Tensor], root: int) -> list[dist.Work]:
        for tensor in tensors:
            if root == self.rank:
                self._values.note(str(kind), tensor)
            elif tensor.is_floating_point():
                self._values.fill(str(kind), tensor)
            else:
                self._values.fill_tokens(tensor, self._vocabulary)
        return [self._post(kind)]

    def sum(self, kind: Kind, tensor: Tensor, root: int) -> dist.Work:
        if root == self.rank:
            self._values.add(str(kind), tensor, self.ranks - 1)
        else:
            self._values.note(str(kind), tensor)
        return self._post(kind)

    def gather(self, kind: Kind, gathered: Tensor, tensor: Tensor) -> dist.Work:
        """Fill ``gathered`` with softmax statistics of made-up peers, and return the handle.

        Each peer gets the statistics that this rank has for another token. The peer's logit of the
        label is zero, as for every label that is not in its own part of the vocabulary.
        """
        of_ranks = gathered.view(self.ranks, *tensor.shape)
        tokens = tensor.shape[1]
        for rank, statistics in enumerate(of_ranks):
            shift = (rank - self.rank) % tokens
            statistics[:, shift:].copy_(tensor[:, : tokens - shift])
            statistics[:, :shift].copy_(tensor[:, tokens - shift :])
            if rank != self.rank:
                statistics[2].zero_()
        return self._post(kind)

    def _post(self, kind: Kind) -> dist.Work:
        return self._times.post([str(kind)], self._max_ctas)


def _direction(channel: Channel) -> str:
    return FORWARD if channel.send is Kind.SEND_F else BACKWARD
