"""Duration of a message between neighbouring ranks, measured by ping-pong on existing connections.

A recorded wait contains the time until the other rank sent, so the duration of a message cannot be
read from a step. Both ranks are idle here, and one message takes half of a round trip.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from megatron_ext.compile.program.graph import Channel
from megatron_ext.runtime.messages.batched import PipelineGroup
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.recording import Clock

# Number of timed rounds of messages. An untimed round comes first, in which a rank may wait for a
# peer that still computes.
ROUNDS = 10


def message_seconds(
    connection: Channels | PipelineGroup,
    channels: Iterable[Channel],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    clock: Clock,
) -> dict[int, float]:
    """Return the seconds of one message of ``shape`` to each neighbour with a higher rank, by rank.

    Called between steps. Collective over the pipeline: every rank passes the same ``channels``.
    Measurements that share a rank run sequentially. The result is half of the median round trip.
    """
    channel_of = {(channel.sender, channel.receiver): channel for channel in sorted(channels)}
    data = torch.zeros(shape, dtype=dtype, device=connection.device)
    pairs = [
        ranks for ranks in sorted(channel_of) if ranks[0] < ranks[1] and connection.rank in ranks
    ]
    seconds = {ranks: _between(connection, channel_of, ranks, data, clock) for ranks in pairs}
    return {upper: figure for (lower, upper), figure in seconds.items() if lower == connection.rank}


def _between(
    connection: Channels | PipelineGroup,
    channel_of: Mapping[tuple[int, int], Channel],
    ranks: tuple[int, int],
    data: Tensor,
    clock: Clock,
) -> float:
    there, back = channel_of[ranks], channel_of[ranks[1], ranks[0]]
    events = [clock.record_event()]
    for _ in range(1 + ROUNDS):
        _move(connection, there, data)
        _move(connection, back, data)
        events.append(clock.record_event())
    times = clock.read(events)[1:]
    rounds = [end - begin for begin, end in pairwise(times)]
    return statistics.median(rounds) / 2


def _move(connection: Channels | PipelineGroup, channel: Channel, data: Tensor) -> None:
    if isinstance(connection, PipelineGroup):
        works = connection.start([(channel, data)])
    elif channel.sender == connection.rank:
        works = [connection.send(channel, data)]
    else:
        works = [connection.receive(channel, data)]
    for work in works:
        work.wait()
