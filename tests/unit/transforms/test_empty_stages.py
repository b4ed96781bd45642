"""Tests of stages without layers, whose passes take no time if the vocabulary is split over the
ranks."""

from __future__ import annotations

import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.problem import Problem, ScheduleOptions, VocabularyParallel


@pytest.mark.parametrize("hop", [0.0, 0.1])
@pytest.mark.parametrize("variant", [VocabularyParallel.ONE, VocabularyParallel.TWO])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "v-half"])
def test_ends_of_the_model_without_layers(
    name: str, variant: VocabularyParallel, hop: float
) -> None:
    """The first and the last stage may have no layers. With the layout 'E|tt|tt|L' the last hidden
    states used to be sent before they were computed."""
    resolved = choose(name)
    placement = resolved.place(3)
    costs = parse_costs("f=1,i=1,w=1,comm=0", placement)
    seconds = {
        kind: (0.0, *costs.seconds[kind][1:-1], 0.0)
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    }
    costs = costs.with_passes(seconds={**costs.seconds, **seconds}).with_links(p2p_seconds=hop)
    program = build_program(
        resolved, Problem(placement, 4, costs, options=ScheduleOptions(vocab_parallel=variant))
    )
    assert program.schedule.placement == placement
