"""Messages between pipeline ranks over torch.distributed.

Each channel has a process group of its own: on one NCCL communicator two directions, or activations
and gradients of one direction, would wait for each other. All channels are made and used once in
one global order before the first step, since NCCL connects on first use and would otherwise
deadlock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

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
        self._pipeline = pipeline
        self._ends = {channel: (channel.sender, channel.receiver) for channel in sorted(channels)}
        self._groups = make_groups(pipeline, self._ends)
        self._shapes: dict[Channel, dist.ProcessGroup] = {}
        for channel in self._groups:
            self._use_once(channel)
        self.are_closed = False

    def connect_hosts(self) -> None:
        """Connect the hosts at the two ends of each channel, for shapes that vary.

        Collective over the world, as `__init__`; once is enough.
        """
        if not self._shapes:
            self._shapes = make_groups(self._pipeline, self._ends, backend="gloo")

    def close(self) -> None:
        """Cut the connections: whoever waits at their other ends fails now, and not only at torch's
        timeout. They cannot be used again, with messages of a broken step in them."""
        for groups in (self._groups, self._shapes):
            while groups:
                self.are_closed = True
                _, group = groups.popitem()
                with contextlib.suppress(RuntimeError):  # the step's own error is the one to show
                    dist.distributed_c10d._abort_process_group(group)
                del group  # gloo closes with the last reference

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

    def send_shape(self, channel: Channel, header: Tensor) -> dist.Work:
        """From host to host, ``header`` on the CPU, after `connect_hosts`."""
        group = self._shapes[channel]
        return group.send([header], 1 - group.rank(), 0)

    def receive_shape(self, channel: Channel, header: Tensor) -> None:
        """Return when the other end's host has sent ``header``."""
        group = self._shapes[channel]
        group.recv([header], 1 - group.rank(), 0).wait()


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


class Connection(Protocol):
    """What messages travel on, over all steps. ``are_closed``: after a failure on this rank."""

    rank: int
    device: torch.device
    are_closed: bool

    def close(self) -> None: ...


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
        parts = []
        with self._dealing_with_peer(action):
            if self._boundary.shape is None:
                header = _shape_header(data)
                parts.append((self._channels.send_shape(channel, header), header))
            parts.append((self._channels.send(channel, data), data))
        self._sending[action] = parts

    def wait_sent(self, send: Action) -> None:
        """Return when the tensor of ``send`` has left."""
        with self._dealing_with_peer(send):
            for work, _ in self._sending.pop(send):
                work.wait()

    def receive(self, action: Action) -> None:
        """Post the receive of ``action``.

        Where shapes vary, the shape comes first, from the other end's host: this one waits for it,
        and for no device. (It comes when the send is posted, whose place in the pipeline's sequence
        is this receive's.)
        """
        channel = self._channel_of(action)
        with self._dealing_with_peer(action):
            shape = self._boundary.shape
            if shape is None:
                header = torch.empty(MAX_DIMENSIONS + 1, dtype=torch.int64)
                self._channels.receive_shape(channel, header)
                dimensions, *sizes = header.tolist()
                shape = tuple(sizes[:dimensions])
            tensor = self._empty(shape, self._boundary.dtype)
            self._receiving[action] = self._channels.receive(channel, tensor), tensor

    def received(self, action: Action) -> Tensor:
        """The tensor of the posted receive ``action``, when it has come."""
        work, tensor = self._receiving.pop(action)
        with self._dealing_with_peer(action):
            work.wait()
        return tensor

    def drop(self) -> None:
        """Return when all that is under way has gone or come; nobody reads it any more."""
        for send in list(self._sending):
            self.wait_sent(send)
        for receive in list(self._receiving):
            self.received(receive)

    def is_empty(self) -> bool:
        """Whether no message is under way, and none has come that nobody has read."""
        return not self._sending and not self._receiving


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
        self._waiting = recorder.waiting(action, peer)

    def __enter__(self) -> None:
        self._waiting.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._waiting.__exit__(None, None, None)
        if not isinstance(error, RuntimeError):
            return
        if isinstance(error, torch.OutOfMemoryError) or str(error).startswith("CUDA error"):
            return  # this rank's own
        if self._direction == "with":
            whom, which = "with the other pipeline ranks", "one of which has failed or hangs"
        else:
            whom = f"{self._direction} pipeline rank {self._peer}"
            which = "which has failed or hangs"
        raise PeerFailure(
            f"pipeline rank {self._recorder.rank} was waiting for {self._action} ({whom}), "
            f"{which}: look for the first error of that rank. torch says: {error}"
        ) from error


def _shape_header(tensor: Tensor) -> Tensor:
    """On the host: the number of dimensions, the sizes, and zeros: one length for every shape."""
    assert tensor.dim() <= MAX_DIMENSIONS
    sizes = [tensor.dim(), *tensor.shape]
    sizes += [0] * (MAX_DIMENSIONS + 1 - len(sizes))
    return torch.tensor(sizes, dtype=torch.int64)
