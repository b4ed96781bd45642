"""Tests of placements: which rank has which stage, and which ranks are neighbours."""

from collections.abc import Callable

import pytest

from megatron_ext.schedule.placement import Neighbour, Placement, line, loop, v, wave

NEXT, PREVIOUS = Neighbour.NEXT, Neighbour.PREVIOUS


@pytest.mark.parametrize("placement", [line(1), line(4), loop(3), v(1), v(3), wave(2, waves=2)])
def test_stages_are_neighbours_in_their_order(placement: Placement) -> None:
    stages, way = [], next((s for s in range(placement.stages) if placement.is_first(s)), None)
    while way is not None:
        stages.append(way)
        way = placement.next(way)
    assert stages == list(range(placement.stages))
    assert placement.is_last(stages[-1]) and stages[-1] == placement.last
    for stage in stages:
        after = placement.neighbour(stage, NEXT)
        if after is None:
            assert placement.is_last(stage) and placement.is_remote(stage, NEXT) is None
            continue
        assert placement.neighbour(after, PREVIOUS) == placement.previous(after) == stage
        hops = placement.rank_of[stage] != placement.rank_of[after]
        assert placement.is_remote(stage, NEXT) is placement.is_remote(after, PREVIOUS) is hops
    assert placement.previous(0) is None and placement.is_remote(0, PREVIOUS) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: line(10**12),
        lambda: v(10**12),
        lambda: loop(4, vpp=10**12),
        lambda: wave(4, waves=10**12),
    ],
)
def test_a_number_beyond_any_model_takes_no_memory(make: Callable[[], Placement]) -> None:
    with pytest.raises(ValueError, match=r"is 1000000000000; no model has \d+ stages"):
        make()
