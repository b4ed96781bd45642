"""Peers of a rank: those at the other ends of its messages and collectives.

They are the other ranks of its pipeline, to which it connects. A rehearsal runs a rank without
them, and installs peers of its own before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ext.compile.program.graph import Channel
from megatron_ext.runtime.messages.batched import PipelineGroup
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.collectives import Collectives
from megatron_ext.runtime.recorder import Recorder

_Group = dist.ProcessGroup
_Device = torch.device


@dataclass(frozen=True)
class Peers:
    """Functions that connect a rank to the ranks at the other ends of its messages and collectives.

    Their arguments are those of the classes in `CONNECTED`.
    """

    channels: Callable[[_Group, Iterable[Channel], _Device, int | None, Recorder], Channels]
    pipeline_group: Callable[[_Group, _Device, Recorder], PipelineGroup]
    collectives: Callable[[_Group, _Device, int | None, Recorder], Collectives]


CONNECTED = Peers(Channels, PipelineGroup, Collectives)
_peers = CONNECTED


def peers() -> Peers:
    """Return the connections of this process to its peers: real ones, or a rehearsal's."""
    return _peers


def rehearse_with(made_up: Peers) -> None:
    """Replace the peers of this process by ``made_up`` ones, in all trainings from now on."""
    global _peers
    _peers = made_up


def are_rehearsed() -> bool:
    """Return whether this process runs in a rehearsal, with made-up peers."""
    return _peers is not CONNECTED
