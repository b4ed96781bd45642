"""Messages of a step, by their actions, on the channels of their ranks.

The executor names messages by their actions. A transport finds the channel, keeps a tensor until it
has left, and knows shapes that are not fixed from a header that goes ahead of the tensor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.compile.program.graph import Channel, channel_of
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.peer_call import PeerCall
from megatron_ext.runtime.recorder import Closable, Recorder
from megatron_ext.schedule.action import Action, Kind, Slice
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.placement import Neighbour, Placement

MAX_DIMENSIONS = 7


@dataclass(frozen=True)
class Boundary:
    """Shape and type of the tensor that passes between stages.

    Attributes:
        shape: shape of one hidden state; None if it varies by microbatch.
        lengths: sizes of the first dimension by slice of a sequence, if microbatches run in slices.
        states: by stage, the number of hidden states that its output concatenates in the first
            dimension, as multi-token prediction before the last stage does; () if all have one.
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    lengths: tuple[int, ...] = ()
    states: tuple[int, ...] = ()

    def shape_of(self, action: Action) -> tuple[int, ...] | None:
        """Return the shape of the tensor that ``action`` sends or receives."""
        if self.shape is None:
            return None
        length, *rest = self.shape
        if self.lengths:
            assert isinstance(action.microbatch, Slice), f"{action} names no slice"
            length = self.lengths[action.microbatch.slice]
        if self.states:
            is_after = RULES[action.kind].neighbour is Neighbour.NEXT
            length *= self.states[action.stage if is_after else action.stage - 1]
        return (length, *rest)


class Connection(Closable, Protocol):
    """Connection of a rank for the messages of all steps.

    ``are_closed`` is true after a failure on this rank.
    """

    rank: int
    device: torch.device
    are_closed: bool


def check_open(connection: Connection) -> None:
    """Raise RuntimeError if ``connection`` was closed after a failure on this rank."""
    if connection.are_closed:
        raise closed(connection.rank)


def closed(rank: int) -> RuntimeError:
    """Return the error for a caller that runs another step on ``rank`` after the rank's failure."""
    return RuntimeError(
        f"pipeline rank {rank} has failed in an earlier step, and its channels are closed: end "
        f"this process, and start all ranks again"
    )


class TransportBase:
    """Common part of the transports, which send and receive the messages of one step."""

    def __init__(
        self, connection: Connection, boundary: Boundary, placement: Placement, recorder: Recorder
    ) -> None:
        check_open(connection)
        self.rank = connection.rank
        self._device = connection.device
        self._boundary = boundary
        self._placement = placement
        self._recorder = recorder
        self._known_channels: dict[tuple[int, Kind], Channel] = {}

    def _data(self, action: Action, tensor: Tensor) -> Tensor:
        """Return ``tensor`` in the form in which ``action`` sends it.

        Raises ValueError unless it matches the boundary, which the other rank receives: gloo would
        abort that rank on another size, and reinterpret the bytes of another type.
        """
        shape, dtype = self._boundary.shape_of(action), self._boundary.dtype
        if tensor.dtype != dtype or (shape is not None and tensor.shape != shape):
            expected = f"{dtype}" if shape is None else f"{dtype} of shape {shape}"
            raise ValueError(
                f"{action} has a tensor of {tensor.dtype} of shape {tuple(tensor.shape)}, but "
                f"messages between the stages of this pipeline have {expected}: set pipeline_dtype "
                "to the type of stages' outputs, and variable_seq_lengths if their shapes differ"
            )
        return tensor.detach().contiguous()

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _channel_of(self, action: Action) -> Channel:
        key = action.stage, action.kind
        if key not in self._known_channels:
            self._known_channels[key] = channel_of(action, self._placement)
        return self._known_channels[key]

    def _calling_peer(self, action: Action) -> AbstractContextManager[None]:
        """Context of a call that the rank at the other end of ``action`` can make fail or wait."""
        channel = self._channel_of(action)
        if channel.sender == self.rank:
            return PeerCall(self._recorder, action, channel.receiver, "to")
        return PeerCall(self._recorder, action, channel.sender, "from")


class Transport(TransportBase):
    """Transport of one step's messages, each of which goes over the channel of its direction."""

    def __init__(
        self, channels: Channels, boundary: Boundary, placement: Placement, recorder: Recorder
    ) -> None:
        super().__init__(channels, boundary, placement, recorder)
        self._channels = channels
        self._sending: dict[Action, list[tuple[dist.Work, Tensor]]] = {}
        self._receiving: dict[Action, tuple[dist.Work, Tensor]] = {}

    def abandon(self) -> None:
        """End the step after an error, and close the connections.

        A rank whose caller goes on after its error would otherwise leave the other ranks waiting.
        """
        self._sending.clear()  # drops messages in flight, which would keep gloo's connections open
        self._receiving.clear()
        self._channels.close()

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start sending ``tensor``; it must not change or be freed before `wait_sent`."""
        channel = self._channel_of(action)
        data = self._data(action, tensor)
        parts = []
        with self._calling_peer(action):
            if self._boundary.shape is None:
                header = _shape_header(data)
                parts.append((self._channels.send_shape(channel, header), header))
            parts.append((self._channels.send(channel, data), data))
        self._sending[action] = parts

    def wait_sent(self, send: Action) -> None:
        """Wait until the tensor of the message ``send`` has left."""
        with self._calling_peer(send):
            for work, _ in self._sending.pop(send):
                work.wait()

    def receive(self, action: Action) -> None:
        """Post the receive of ``action``.

        If shapes vary, the sending host first sends the shape: this host waits for it, but for no
        device. (The shape comes when the send is posted. Sends of a channel are posted in the order
        of its receives, as the proof has checked.)
        """
        channel = self._channel_of(action)
        with self._calling_peer(action):
            shape = self._boundary.shape_of(action)
            if shape is None:
                header = torch.empty(MAX_DIMENSIONS + 1, dtype=torch.int64)
                self._channels.receive_shape(channel, header)
                dimensions, *sizes = header.tolist()
                shape = tuple(sizes[:dimensions])
            tensor = self._empty(shape, self._boundary.dtype)
            self._receiving[action] = self._channels.receive(channel, tensor), tensor

    def received(self, action: Action) -> Tensor:
        """Return the tensor of the posted receive ``action``, once it has arrived."""
        work, tensor = self._receiving.pop(action)
        with self._calling_peer(action):
            work.wait()
        return tensor

    def drain(self) -> None:
        """Wait for all messages in flight, which no pass will read."""
        for send in list(self._sending):
            self.wait_sent(send)
        for receive in list(self._receiving):
            self.received(receive)

    def is_empty(self) -> bool:
        """Return whether no message is in flight, or received but not read."""
        return not self._sending and not self._receiving


def _shape_header(tensor: Tensor) -> Tensor:
    """Return a host tensor of fixed length that holds the shape of ``tensor``, to be sent ahead.

    Its values are the number of dimensions, then the sizes, then zeros.
    """
    assert tensor.dim() <= MAX_DIMENSIONS
    sizes = [tensor.dim(), *tensor.shape]
    sizes += [0] * (MAX_DIMENSIONS + 1 - len(sizes))
    return torch.tensor(sizes, dtype=torch.int64)
