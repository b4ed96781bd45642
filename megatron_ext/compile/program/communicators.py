"""The communicators of a pipeline: their number on each rank, their device resources, and the order
in which they connect.

Each channel (`graph.channels`) has its own communicator, so that a message whose partner is late
delays no other. A channel is one kind of message on one directed edge of ranks. Each kind of
collective also has its own, with all ranks of the pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from megatron_ext.compile.program.graph import Channel, channels
from megatron_ext.compile.program.verify import Program
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.problem import P2P, VocabularyParallel

COLLECTIVES: tuple[Kind, ...] = tuple(
    sorted(kind for kind, rule in RULES.items() if rule.lane is Lane.COLLECTIVE)
)

# A message or collective that has been posted is a running kernel. Its CTAs (NCCL's channels) keep
# their multiprocessors until the other end has come, so all communicators that may be in use at
# once have to leave most of a device to the passes.
SHARE_OF_DEVICE = 4  # all communicators together use less than 1 / SHARE_OF_DEVICE of a device

# Bytes that NCCL allocates for each CTA of an incoming connection over NVLink: one buffer for each
# protocol (LL, LL128 and Simple), with the sizes of NCCL 2.30 unless NCCL_BUFFSIZE and similar
# variables set others.
BUFFER_BYTES = 2**19 + 8 * 8 * 120 * 640 + 2**22


@dataclass(frozen=True)
class Communicators:
    """Numbers of the NCCL communicators that one rank creates for a pipeline program.

    Attributes:
        channels: number of communicators of messages, each shared with one other rank.
        incoming: number of ``channels`` on which the rank receives.
        collectives: number of communicators shared with all ranks of the pipeline.
    """

    channels: int
    incoming: int
    collectives: int

    @property
    def total(self) -> int:
        return self.channels + self.collectives

    def buffer_bytes(self, ctas: int) -> int:
        """Return the bytes of NCCL's buffers on a device, if incoming channels use NVLink.

        ``ctas`` is the number of CTAs of each channel.
        """
        return (self.incoming + self.collectives) * ctas * BUFFER_BYTES


def communicators(program: Program) -> list[Communicators]:
    """Return the communicators that each rank creates to run ``program``, beyond its trainer's.

    Groups for messages through host memory are not counted, as they use nothing of a device.
    """
    problem = program.problem
    message_channels = (
        channels(program.schedule) if problem.options.p2p is P2P.ASYNC else set[Channel]()
    )
    shares = problem.options.vocab_parallel is not VocabularyParallel.NONE
    ends = Counter(
        rank for channel in message_channels for rank in (channel.sender, channel.receiver)
    )
    incoming = Counter(channel.receiver for channel in message_channels)
    return [
        Communicators(ends[rank], incoming[rank], len(COLLECTIVES) if shares else 0)
        for rank in range(problem.ranks)
    ]


def ctas_of_each(communicators: int, multiprocessors: int) -> int:
    """Return how many CTAs (NCCL thread blocks) each of a rank's ``communicators`` may use.

    All of them together take less than a quarter of the device's ``multiprocessors``. The result is
    at least 1, even if that is more than a quarter, and a power of two, like the result of
    `ctas_used`.
    """
    assert communicators > 0, "without communicators there is nothing to share out"
    ctas = 1
    while 2 * ctas * communicators * SHARE_OF_DEVICE < multiprocessors:
        ctas *= 2
    return ctas


def ctas_used(ctas: int) -> int:
    """Return how many CTAs NCCL uses for messages if it may use ``ctas``: the next power of two."""
    return 1 << max(0, ctas - 1).bit_length()


def is_within_share(ctas: int, multiprocessors: int) -> bool:
    """Return whether NCCL's ``ctas`` of a rank take less than a quarter of ``multiprocessors``.

    ``ctas`` counts those of all the rank's communicators.
    """
    return ctas * SHARE_OF_DEVICE < multiprocessors


def waves(pairs: Iterable[Collection[int]]) -> list[list[tuple[int, int]]]:
    """Return the distinct ``pairs`` of ranks, sorted into rounds in which no rank occurs twice.

    Rounds are found by first fit. There are two rounds on a line, V or wave, and three on a loop of
    an odd number of ranks.
    """
    rounds: list[list[tuple[int, int]]] = []
    busy: list[set[int]] = []  # for each round of connecting, the ranks that are busy in it
    for peers in sorted({(min(peers), max(peers)) for peers in pairs}):
        number = next((n for n, ranks in enumerate(busy) if ranks.isdisjoint(peers)), len(rounds))
        if number == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[number].append(peers)
        busy[number].update(peers)
    return rounds


def in_waves(channels: Iterable[Channel]) -> list[Channel]:
    """Return ``channels`` in an order in which ranks can connect them without waiting in a cycle.

    Pairs of ranks of one round (`waves`) connect at the same time, the channels of a pair one after
    the other.
    """
    of_peers: dict[tuple[int, int], list[Channel]] = {}
    for channel in sorted(channels):
        peers = min(channel.sender, channel.receiver), max(channel.sender, channel.receiver)
        of_peers.setdefault(peers, []).append(channel)
    return [channel for wave in waves(of_peers) for peers in wave for channel in of_peers[peers]]
