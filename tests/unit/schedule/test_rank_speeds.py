"""Tests of ranks of different speeds: each pass of a slow rank takes longer, and nothing else
changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ext.compile.transforms.vocabulary_costs import share_vocabulary
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs_text import format_costs, parse_costs
from megatron_ext.schedule.placement import line, v
from megatron_ext.schedule.problem import VocabularyParallel
from megatron_ext.schedule.rank_speeds import RankSpeeds, at_speeds, parse_rank_speeds
from tests.unit.schedule.test_cost_parts import FULL, _changed

SPEEDS = (1.0, 0.5, 1.0, 4.0)


def test_passes_of_a_slow_rank_take_longer_and_nothing_else_changes() -> None:
    before = replace(FULL, slowness=(), unpartitioned=None)
    slowed = at_speeds(before, line(4), SPEEDS)
    assert set(_changed(before, slowed)) == {
        *("passes.seconds", "passes.recompute", "passes.fused_backward_saving", "slices.fixed"),
        # the embedding is on the first rank, whose speed is 1
        *("overlap.savings", "vocabulary.output_layer", "vocabulary.fixed_output_layer"),
        "slowness",
    }
    for kind, figures in before.seconds.items():
        assert slowed.seconds[kind] == (figures[0], 2 * figures[1], figures[2], figures[3] / 4)
    assert slowed.of_attention(Kind.FORWARD, 1) == 2 * before.of_attention(Kind.FORWARD, 1)


def test_a_rank_of_a_v_is_slow_in_both_of_its_stages() -> None:
    costs = at_speeds(parse_costs("f=10,i=12,w=8,comm=1", v(2)), v(2), (1.0, 0.5))
    # The V placement opens on the last rank, which has the first and the last stage.
    assert costs.seconds[Kind.FORWARD] == (10.0, 5.0, 5.0, 10.0)


def test_each_rank_takes_its_part_of_a_divided_vocabulary_at_its_own_speed() -> None:
    costs = parse_costs("f=10,i=12,w=8,output_layer=8/8/8,embedding=2/2", line(4))
    slowed = at_speeds(costs, line(4), SPEEDS)
    shared = share_vocabulary(slowed, line(4), VocabularyParallel.ONE)
    assert shared.seconds[Kind.LOGITS] == (2.0, 4.0, 2.0, 0.5)
    assert shared.seconds[Kind.EMBEDDING] == (0.5, 1.0, 0.5, 0.125)


def test_equal_speeds_change_nothing() -> None:
    costs = parse_costs("f=10,i=12,w=8", line(4))
    assert at_speeds(costs, line(4), (1.0,) * 4) is costs
    assert at_speeds(costs, line(4), ()) is costs


def test_speeds_are_read_and_written() -> None:
    assert parse_rank_speeds("1, 1,0.77,2").of_ranks(4) == (1.0, 1.0, 0.77, 2.0)
    assert parse_rank_speeds(str(RankSpeeds(SPEEDS))).values == SPEEDS
    for text, why in (
        ("1,1", "2 speeds for 4 pipeline ranks"),
        ("1,1,x,1", "not all are numbers"),
        ("1,1,0,1", "from 0.01 to 100"),
        ("1,1,nan,1", "from 0.01 to 100"),
    ):
        with pytest.raises(ValueError, match=why):
            parse_rank_speeds(text).of_ranks(4)


def test_a_tower_is_what_the_first_stage_takes_beyond_its_layers() -> None:
    text = "f=10/10,i=12/12,w=8/8,comm=1,tower=8/8/4"
    costs = parse_costs(text, line(2))
    assert costs.seconds[Kind.FORWARD] == (18.0, 10.0)
    assert costs.seconds[Kind.BACKWARD_WEIGHT] == (12.0, 8.0)
    assert format_costs(costs) == text
    assert costs.without_tower() == parse_costs("f=10,i=12,w=8,comm=1", line(2))
    with pytest.raises(ValueError, match="tower takes 3 numbers, the times of F, I and W"):
        parse_costs("f=1,i=1,w=1,tower=3", line(2))
