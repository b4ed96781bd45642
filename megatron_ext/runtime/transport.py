"""Messages between pipeline ranks over torch.distributed.

Each channel has a process group of its own: on one NCCL communicator two directions, or activations
and gradients of one direction, would wait for each other. All channels are made and used once in
one global order before the first step, since NCCL connects on first use and would otherwise
deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.runtime.closing import close_groups
from megatron_ext.runtime.position import whom
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.graph import Channel, channel_of
from megatron_ext.schedule.placement import Placement

MAX_DIMENSIONS = 7


class PeerFailure(RuntimeError):
    """A message did not come or go because the rank at its other end has failed."""


class Channels:
    """The process groups of a pipeline's channels that this rank is an end of."""

    def __init__(
        self, pipeline: dist.ProcessGroup, channels: Iterable[Channel], device: torch.device
    ) -> None:
        """Collective over the world, as torch.distributed.new_group is: every rank of every
        pipeline calls it, with the same ``channels``."""
        self.rank = pipeline.rank()
        self.device = device
        ends = {channel: (channel.sender, channel.receiver) for channel in sorted(channels)}
        self._groups = make_groups(pipeline, ends)
        for channel in self._groups:
            self._use_once(channel)
        self.are_closed = False

    def close(self) -> None:
        """Cut the connections: whoever waits at their other ends fails now, and not only at torch's
        timeout. They cannot be used again, with messages of a broken step in them."""
        if self._groups:
            self.are_closed = True
        close_groups(self._groups)

    def _use_once(self, channel: Channel) -> None:
        token = torch.zeros(1, device=self.device)
        move = self.send if self.rank == channel.sender else self.receive
        move(channel, token).wait()

    # The groups themselves are asked, not dist.isend and irecv: they look up for every message
    # which rank of a group of two is the other.

    def send(self, channel: Channel, tensor: Tensor) -> dist.Work:
        group = self._groups[channel]
        return group.send([tensor], 1 - group.rank(), 0)

    def receive(self, channel: Channel, tensor: Tensor) -> dist.Work:
        group = self._groups[channel]
        return group.recv([tensor], 1 - group.rank(), 0)


def make_groups[Key](
    pipeline: dist.ProcessGroup,
    members: Mapping[Key, Collection[int]],
    backend: str | None = None,
) -> dict[Key, dist.ProcessGroup]:
    """A process group for each of ``members``, given as pipeline ranks; those of this rank.

    They have the pipeline's timeout, and ``backend``, or the world's.

    Collective over the world: every rank of every pipeline calls it with the same ``members``, in
    the same order.
    """
    mine = dist.get_process_group_ranks(pipeline)
    timeout = pipeline._get_backend(pipeline._device_types[0]).options._timeout
    groups: dict[Key, dist.ProcessGroup] = {}
    for ranks in _all_pipelines(mine):
        for key, members_of_key in members.items():
            group = dist.new_group(
                [ranks[member] for member in members_of_key], timeout=timeout, backend=backend
            )
            if ranks == mine and pipeline.rank() in members_of_key:
                assert isinstance(group, dist.ProcessGroup)
                groups[key] = group
    return groups


def _all_pipelines(mine: list[int]) -> list[list[int]]:
    """The global ranks of every pipeline in the world, in one order everywhere."""
    gathered: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    return sorted({tuple(ranks): ranks for ranks in gathered}.values())


@dataclass(frozen=True)
class Boundary:
    """The tensor that passes between stages. ``shape`` is None where it varies by microbatch."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype


class Closable(Protocol):
    """What can be cut, by any thread."""

    def close(self) -> None: ...


class Connection(Closable, Protocol):
    """What messages travel on, over all steps. ``are_closed``: after a failure on this rank."""

    rank: int
    device: torch.device
    are_closed: bool


def check_open(connection: Connection) -> None:
    """Raise RuntimeError after a failure on this rank."""
    if connection.are_closed:
        raise closed(connection.rank)


def closed(rank: int) -> RuntimeError:
    """What ``rank`` tells whoever goes on after its failure."""
    return RuntimeError(
        f"pipeline rank {rank} has failed in an earlier step, and its channels are closed: end "
        f"this process, and start all ranks again"
    )


class TransportBase:
    """What the messages of a step need, whatever they travel on."""

    def __init__(
        self, connection: Connection, boundary: Boundary, placement: Placement, recorder: Recorder
    ) -> None:
        check_open(connection)
        self.rank = connection.rank
        self._device = connection.device
        self._boundary = boundary
        self._placement = placement
        self._recorder = recorder
        self._ways: dict[tuple[int, Kind], Channel] = {}

    def _data(self, action: Action, tensor: Tensor) -> Tensor:
        """What ``action`` sends.

        The other rank receives what the boundary says: gloo would abort it on another size, and
        take another type's bytes for its own.
        """
        shape, dtype = self._boundary.shape, self._boundary.dtype
        if tensor.dtype != dtype or (shape is not None and tensor.shape != shape):
            expected = f"{dtype}" if shape is None else f"{dtype} of shape {shape}"
            raise ValueError(
                f"{action} has a tensor of {tensor.dtype} of shape {tuple(tensor.shape)}, but the "
                f"stages of this pipeline pass on {expected}"
            )
        return tensor.detach().contiguous()

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _channel_of(self, action: Action) -> Channel:
        key = action.stage, action.kind
        if key not in self._ways:
            self._ways[key] = channel_of(action, self._placement)
        return self._ways[key]

    def _dealing_with_peer(self, action: Action) -> AbstractContextManager[None]:
        """Around each call that the rank at the other end of ``action`` can make fail or wait."""
        channel = self._channel_of(action)
        if channel.sender == self.rank:
            return Dealing(self._recorder, action, channel.receiver, "to")
        return Dealing(self._recorder, action, channel.sender, "from")


class Transport(TransportBase):
    """The messages of one step, by their actions, each on its channel."""

    def __init__(
        self, channels: Channels, boundary: Boundary, placement: Placement, recorder: Recorder
    ) -> None:
        super().__init__(channels, boundary, placement, recorder)
        self._channels = channels
        self._sending: dict[Action, list[tuple[dist.Work, Tensor]]] = {}
        self._receiving: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._unread: dict[Channel, deque[Action]] = {}  # varying shapes: posted, not yet read
        self._read: dict[Action, Tensor] = {}

    def abandon(self) -> None:
        """Give the step up. A rank whose caller goes on after its error would leave the others
        waiting."""
        self._sending.clear()  # what is on its way keeps gloo's connections open
        self._receiving.clear()
        self._channels.close()

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start sending ``tensor``; it must not change or be freed before `wait_sent`."""
        channel = self._channel_of(action)
        data = self._data(action, tensor)
        parts = [data]
        if self._boundary.shape is None:
            parts.insert(0, _shape_header(data))
        with self._dealing_with_peer(action):
            self._sending[action] = [(self._channels.send(channel, part), part) for part in parts]

    def wait_sent(self, send: Action) -> None:
        """Return when the tensor of ``send`` has left."""
        with self._dealing_with_peer(send):
            for work, _ in self._sending.pop(send):
                work.wait()

    def receive(self, action: Action) -> None:
        """Post the receive of ``action``.

        Where shapes vary, the shape comes first and the tensor can be received only when it is
        known: then both are done in `received`, in the channel's order.
        """
        channel = self._channel_of(action)
        if self._boundary.shape is None:
            self._unread.setdefault(channel, deque()).append(action)
        else:
            tensor = self._empty(self._boundary.shape, self._boundary.dtype)
            with self._dealing_with_peer(action):
                self._receiving[action] = self._channels.receive(channel, tensor), tensor

    def received(self, action: Action) -> Tensor:
        """The tensor of the posted receive ``action``, when it has come."""
        if self._boundary.shape is None:
            channel = self._channel_of(action)
            while action not in self._read:
                following = self._unread[channel].popleft()
                self._read[following] = self._receive_shaped(channel, following)
            return self._read.pop(action)
        work, tensor = self._receiving.pop(action)
        with self._dealing_with_peer(action):
            work.wait()
        return tensor

    def drop(self) -> None:
        """Return when all that is under way has gone or come; nobody reads it any more.

        What can only be received when its shape has come comes first: all sends have been started,
        but the ranks they go to may each wait for one of their own to be taken.
        """
        for channel, unread in self._unread.items():
            while unread:
                self._receive_shaped(channel, unread.popleft())
        for send in list(self._sending):
            self.wait_sent(send)
        for receive in list(self._receiving):
            self.received(receive)
        self._read.clear()

    def is_empty(self) -> bool:
        """Whether no message is under way, and none has come that nobody has read."""
        return not any([self._sending, self._receiving, self._read, *self._unread.values()])

    def _receive_shaped(self, channel: Channel, action: Action) -> Tensor:
        header = self._empty((MAX_DIMENSIONS + 1,), torch.int64)
        with self._dealing_with_peer(action):
            self._channels.receive(channel, header).wait()
        dimensions, *sizes = header.tolist()
        tensor = self._empty(tuple(sizes[:dimensions]), self._boundary.dtype)
        with self._dealing_with_peer(action):
            self._channels.receive(channel, tensor).wait()
        return tensor


class Dealing:
    """A call that a peer can make fail or wait. (A class costs less than a generator.)

    ``direction``: whether a message goes ``to`` the peer or comes ``from`` it, or what it and all
    other ranks do ``with`` one another.
    """

    __slots__ = ("_action", "_direction", "_peer", "_recorder", "_waiting")

    def __init__(self, recorder: Recorder, action: Action, peer: int, direction: str) -> None:
        self._recorder = recorder
        self._action = action
        self._peer = peer
        self._direction = direction
        self._waiting = recorder.waiting(action, peer, direction)

    def __enter__(self) -> None:
        self._waiting.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._waiting.__exit__(kind, error, trace)
        recorder = self._recorder
        if recorder.interruption is not None and (error is None or isinstance(error, Exception)):
            raise PeerFailure(
                f"pipeline rank {recorder.rank} was waiting for {self._action} "
                f"({whom(self._peer, self._direction)}) when another rank had failed: "
                f"{recorder.interruption}"
            ) from error
        if not isinstance(error, RuntimeError):
            return
        if isinstance(error, torch.OutOfMemoryError) or str(error).startswith("CUDA error"):
            return  # this rank's own
        which, peers = "which has failed or hangs", [self._peer]
        if self._direction == "with":
            which, peers = "one of which has failed or hangs", []
        raise PeerFailure(
            f"pipeline rank {recorder.rank} was waiting for {self._action} "
            f"({whom(self._peer, self._direction)}), {which}: look for the first error of that "
            f"rank {recorder.whereabouts.note(*peers)}. torch says: {error}"
        ) from error


def _shape_header(tensor: Tensor) -> Tensor:
    """The number of dimensions, the sizes, and zeros: one length for every shape."""
    assert tensor.dim() <= MAX_DIMENSIONS
    sizes = [tensor.dim(), *tensor.shape]
    sizes += [0] * (MAX_DIMENSIONS + 1 - len(sizes))
    return torch.tensor(sizes, dtype=torch.int64, device=tensor.device)
