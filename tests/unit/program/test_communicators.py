"""Tests of the communicators of a rank: which ones there are, how many CTAs each gets, and in which
rounds they connect."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.communicators import (
    COLLECTIVES,
    Communicators,
    communicators,
    ctas_of_each,
    ctas_used,
    in_waves,
    is_within_share,
    waves,
)
from megatron_ext.compile.program.graph import Channel, channel_of, channels, partner_of
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose, entries
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.kinds import RULES, Lane, Where
from megatron_ext.schedule.placement import Placement, line, loop, v, wave
from megatron_ext.schedule.problem import P2P, Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule
from tests.helpers.random_schedules import random_placement

H100 = 132  # multiprocessors of an H100
SPECS = [*entries(), "interleaved:vpp=3", "gis:vpp=4", "hanayo:waves=2", "hanayo:waves=3"]


def ways_of(placement: Placement) -> set[Channel]:
    return channels(Schedule("none", placement, ((),) * placement.ranks))


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("spec", SPECS)
def test_a_communicator_for_each_directed_edge_and_kind(spec: str, ranks: int) -> None:
    """Each directed edge between ranks has a communicator for each kind of message on it.

    With one communicator for a whole direction, a message that is not received yet would delay
    messages of other edges. On a loop placement two ranks send both ways, and on a V placement a
    rank sends activations and gradients to the same neighbour.
    """
    placement = choose(spec).place(ranks)
    rank_of = placement.rank_of
    expected = set()
    for stage in range(placement.stages - 1):
        here, there = rank_of[stage], rank_of[stage + 1]
        if here != there:
            expected |= {Channel(here, there, Kind.SEND_F), Channel(there, here, Kind.SEND_B)}
    assert ways_of(placement) == expected
    for kind, rule in RULES.items():
        if rule.lane is not Lane.SEND or rule.where is not Where.STAGE:
            continue
        for stage in range(placement.stages):
            other = stage + {Kind.SEND_F: 1, Kind.SEND_B: -1}[kind]
            if 0 <= other < placement.stages and rank_of[other] != rank_of[stage]:
                send = Action(stage, kind, 0)
                way = channel_of(send, placement)
                assert way == (rank_of[stage], rank_of[other], kind)
                assert way == channel_of(partner_of(send, placement), placement)


def program_of(
    spec: str,
    ranks: int,
    p2p: P2P = P2P.ASYNC,
    vocabulary: VocabularyParallel = VocabularyParallel.NONE,
) -> Program:
    resolved = choose(spec)
    placement = resolved.place(ranks)
    costs = parse_costs("f=2,i=2,w=2,output_layer=1/1/1,embedding=1/1", placement)
    return build_program(
        resolved,
        Problem(placement, 4, costs, options=ScheduleOptions(p2p=p2p, vocab_parallel=vocabulary)),
    )


def test_what_a_rank_has() -> None:
    ends, inner = Communicators(4, 2, 0), Communicators(8, 4, 0)
    assert communicators(program_of("zb-v", 4)) == [ends, inner, inner, ends]
    ends, inner = Communicators(2, 1, 0), Communicators(4, 2, 0)
    assert communicators(program_of("1f1b", 3)) == [ends, inner, ends]
    shared = program_of("1f1b", 2, vocabulary=VocabularyParallel.TWO)
    assert communicators(shared) == [Communicators(2, 1, len(COLLECTIVES))] * 2
    assert communicators(program_of("1f1b", 2, P2P.BATCHED)) == [Communicators(0, 0, 0)] * 2


def test_a_rank_keeps_three_quarters_of_its_device() -> None:
    """Communicators leave a rank three quarters of its multiprocessors. With NCCL's own 16 CTAs for
    each channel, an inner rank of a V placement would use 128 of 132 multiprocessors."""
    assert ctas_of_each(8, H100) == 4
    assert ctas_of_each(8 + len(COLLECTIVES), H100) == 2
    assert ctas_of_each(2, H100) == 16
    for multiprocessors in (56, 108, 114, 132, 148, 160):
        for number in range(1, 100):
            ctas = ctas_of_each(number, multiprocessors)
            assert ctas_used(ctas) == ctas, "NCCL would use more"
            if ctas > 1:
                assert is_within_share(number * ctas, multiprocessors)
            assert not is_within_share(2 * number * ctas, multiprocessors)
    assert ctas_of_each(40, H100) == 1
    assert [ctas_used(ctas) for ctas in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert not is_within_share(33, H100) and is_within_share(32, H100)


def test_what_nccls_buffers_take() -> None:
    """The estimate of NCCL's buffers is near the sizes that others have measured: with 16 to 32
    CTAs for each incoming channel, 150 to 300 MiB."""
    megabytes = [Communicators(2, 1, 0).buffer_bytes(ctas) / 2**20 for ctas in (16, 32)]
    assert megabytes == pytest.approx([147, 294])
    assert Communicators(8, 4, 7).buffer_bytes(2) == 22 * Communicators(2, 1, 0).buffer_bytes(1)


def neighbours(placement: Placement) -> list[tuple[int, int]]:
    return [(way.sender, way.receiver) for way in ways_of(placement)]


@pytest.mark.parametrize("ranks", range(2, 40))
def test_few_waves(ranks: int) -> None:
    """Channels connect in two or three rounds, however many ranks there are. If each pair of
    neighbours waited for the pair before it, start-up time would grow with the pipeline."""
    expected = min(2, ranks - 1)
    for placement in (line(ranks), v(ranks), wave(ranks), wave(ranks, waves=3)):
        assert len(waves(neighbours(placement))) == expected
    for chunks in (2, 3):
        on_loop = len(waves(neighbours(loop(ranks, vpp=chunks))))
        assert on_loop == (3 if ranks % 2 else expected)


def check_waves(ways: set[Channel]) -> None:
    all_waves = waves([(way.sender, way.receiver) for way in ways])
    for pairs in all_waves:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks)), "a rank is in two pairs of one wave"
    pairs_of_all = [pair for pairs in all_waves for pair in pairs]
    assert len(pairs_of_all) == len(set(pairs_of_all))
    assert {frozenset(pair) for pair in pairs_of_all} == {frozenset(way[:2]) for way in ways}
    order = in_waves(ways)
    assert sorted(order) == sorted(ways)
    # In this order all channels between the same two ranks are consecutive.
    pairs_in_order = [frozenset(way[:2]) for way in order]
    changes = sum(pair != after for pair, after in pairwise(pairs_in_order))
    assert changes == max(0, len(pairs_of_all) - 1)


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("spec", SPECS)
def test_waves_are_disjoint_and_cover_all(spec: str, ranks: int) -> None:
    check_waves(ways_of(choose(spec).place(ranks)))


def test_waves_of_any_placement() -> None:
    for seed in range(200):
        check_waves(ways_of(random_placement(random.Random(seed))))


def rounds_to_connect(order: list[Channel]) -> int:
    """Return the number of rounds until all channels are connected. Each rank connects its channels
    in their order, and takes one round for each."""
    left = list(order)
    rounds = 0
    while left:
        begun: set[int] = set()
        met = []
        for way in left:
            if not begun & {way.sender, way.receiver}:
                met.append(way)
            begun |= {way.sender, way.receiver}
        assert met, "the ranks wait for one another"
        left = [way for way in left if way not in met]
        rounds += 1
    return rounds


def test_start_up_takes_as_long_as_the_busiest_rank() -> None:
    """Start-up takes as many rounds as the busiest rank has channels.

    Channels used to connect in sorted order. On a linear placement they then formed a chain that
    took 2 (p - 1) rounds.
    """
    ways = ways_of(line(16))
    assert rounds_to_connect(in_waves(ways)) == 4
    assert rounds_to_connect(sorted(ways)) == 30
    assert rounds_to_connect(in_waves(ways_of(v(16)))) == 8
    assert rounds_to_connect(in_waves(ways_of(loop(16)))) == 4
    assert rounds_to_connect(in_waves(ways_of(loop(15)))) == 6
