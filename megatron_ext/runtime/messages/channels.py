"""Channels of a pipeline over torch.distributed.

Each channel has a process group of its own: on one NCCL communicator two directions, or activations
and gradients of one direction, would wait for each other. All channels are created and used once in
one global order before the first step, because NCCL connects on first use and would otherwise
deadlock. Pairs of ranks that share no rank connect at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.compile.program.communicators import in_waves
from megatron_ext.compile.program.graph import Channel
from megatron_ext.runtime.messages.closing import close_groups
from megatron_ext.runtime.messages.connecting import connecting
from megatron_ext.runtime.messages.groups import make_device_groups, make_groups
from megatron_ext.runtime.recorder import Recorder


class Channels:
    """Process groups of all channels in which this rank sends or receives messages of stages."""

    def __init__(
        self,
        pipeline: dist.ProcessGroup,
        channels: Iterable[Channel],
        device: torch.device,
        max_ctas: int | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Connect all channels of this rank, before the first step.

        Collective over the pipeline: its ranks pass the same ``channels``. ``max_ctas`` limits
        NCCL's CTAs of each channel (`make_device_groups`). ``recorder`` is notified of the
        connections, and closes them; None for a rank that is not watched.
        """
        self.rank = pipeline.rank()
        self.device = device
        self.are_closed = False
        self._pipeline = pipeline
        self._recorder = recorder or Recorder(self.rank)
        self._ends = {
            channel: (channel.sender, channel.receiver)
            for channel in in_waves(channels)
            if self.rank in (channel.sender, channel.receiver)
        }
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._host_groups: dict[Channel, dist.ProcessGroup] = {}
        self._recorder.add_connection(self)
        for channel, ends in self._ends.items():
            with connecting(self._recorder, pipeline, str(channel), ends):
                self._groups |= make_device_groups(pipeline, {channel: ends}, device, max_ctas)
                self._use_once(channel)

    def connect_hosts(self) -> None:
        """Connect the hosts at the two ends of each channel, which exchange shapes that vary.

        Collective over the pipeline, like `__init__`; a second call makes no groups.
        """
        if self._host_groups:
            return
        for channel, ends in self._ends.items():
            with connecting(self._recorder, self._pipeline, f"{channel} of hosts", ends):
                self._host_groups |= make_groups(self._pipeline, {channel: ends}, "gloo")

    def close(self) -> None:
        """Cut the connections, so that ranks waiting at the other ends fail before torch's timeout.

        The channels cannot be used any more, since they contain messages of a failed step.
        """
        if self._groups:  # without process groups there is nothing to close
            self.are_closed = True
        close_groups(self._groups)
        close_groups(self._host_groups)

    def _use_once(self, channel: Channel) -> None:
        token = torch.zeros(1, device=self.device)
        move = self.send if self.rank == channel.sender else self.receive
        move(channel, token).wait()

    # Messages call the process group directly: for each message dist.isend and dist.irecv would
    # look up the peer's rank within a group of two.

    def send(self, channel: Channel, tensor: Tensor) -> dist.Work:
        group = self._groups[channel]
        return group.send([tensor], 1 - group.rank(), 0)

    def receive(self, channel: Channel, tensor: Tensor) -> dist.Work:
        group = self._groups[channel]
        return group.recv([tensor], 1 - group.rank(), 0)

    def send_shape(self, channel: Channel, header: Tensor) -> dist.Work:
        """Send ``header``, a CPU tensor that holds a shape, from host to host.

        Requires `connect_hosts`.
        """
        group = self._host_groups[channel]
        return group.send([header], 1 - group.rank(), 0)

    def receive_shape(self, channel: Channel, header: Tensor) -> None:
        """Receive the shape ``header`` that the host at the other end sends."""
        group = self._host_groups[channel]
        group.recv([header], 1 - group.rank(), 0).wait()
