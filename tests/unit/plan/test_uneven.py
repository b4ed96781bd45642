"""Tests of layouts for a first stage with an image encoder and for a slow rank.

Most cases have 80 equal layers on 8 ranks, F : I : W = 10 : 12 : 8, messages of 1 unit, and the
memory of 1F1B.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.cost_model.gpus import GPUS, parse_gpus
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.planner.layouts.given import given_work
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.minimax import least_slowest_stage
from megatron_ext.planner.layouts.stage_figures import StageFigures
from megatron_ext.planner.mixed_gpus import product_of, speeds_of_gpus
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.rank_speeds import RankSpeeds
from scripts.benchmarks import uneven
from tests.helpers.combinations import at_night

# For each encoder and placement, the step time as a multiple of a step without a bubble: with even
# layers, and the most that a layout may take.
TOWERS = {
    ("trained", uneven.LINE): (1.716, 1.26),
    ("trained", uneven.V): (1.636, 1.18),
    # The second number is the least of all layouts with whole layers, by exhaustive search.
    ("frozen", uneven.LINE): (1.367, 1.29),
    ("frozen", uneven.V): (1.226, 1.20),
}


@pytest.mark.parametrize(
    ("trained", "spec"),
    [
        *[case for case in TOWERS if case[1] == uneven.LINE],
        *at_night(*[case for case in TOWERS if case[1] == uneven.V]),
    ],
)
def test_layers_are_balanced_to_a_tower(trained: str, spec: str) -> None:
    even, most = TOWERS[trained, spec]
    steps = uneven.with_tower(trained, spec)
    assert steps.even == pytest.approx(even, abs=0.001)
    assert steps.laid_out <= most
    assert steps.layout.layers[0] < uneven.LAYERS / steps.layout.stages


@pytest.mark.parametrize(
    ("rank", "spec"),
    [(4, uneven.LINE), *at_night(*[(r, s) for r in range(8) for s in (uneven.LINE, uneven.V)])],
)
def test_layers_are_balanced_to_a_slow_rank(rank: int, spec: str) -> None:
    steps = uneven.with_slow_rank(rank, spec)
    assert steps.even > 1.2 and steps.laid_out <= 1.09


def plan(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["plan", *words, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if code == 0 else result.output


SMALL = ("pp=2,m=6,layers=8", "--memory-limit", "1x")


def test_plan_writes_the_layout_for_a_tower() -> None:
    made = plan(*SMALL, "--costs", "f=10,i=12,w=8,comm=1,tower=5/6/4")
    added = made["written"]["added"]
    layout = added[added.index("--pipeline-model-parallel-layout") + 1]
    assert layout.startswith(("Et|", "Ett|", "Ettt|"))
    even = plan("pp=2,m=6", *SMALL[1:], "--costs", "f=10,i=12,w=8,comm=1,tower=5/6/4")
    assert made["verdict"]["taken"]["seconds"] < even["verdict"]["taken"]["seconds"]


def test_plan_writes_the_layout_and_the_speeds_for_a_slow_rank() -> None:
    words = (*SMALL, "--costs", "f=10,i=12,w=8,comm=1", "--rank-speeds", "1,0.6")
    added = plan(*words)["written"]["added"]
    assert added[added.index("--pipeline-rank-speeds") + 1] == "1,0.6"
    assert "--pipeline-model-parallel-layout" in added


def test_what_cannot_be_is_said() -> None:
    costs = ("--costs", "f=10,i=12,w=8")
    assert "3 speeds for 2 pipeline ranks" in plan(*SMALL, *costs, "--rank-speeds", "1,1,1", code=2)
    assert "--vision: costs alone have no model: add its sizes" in plan(
        *SMALL, *costs, "--vision", "siglip", code=2
    )


def test_gpus_of_several_types_have_speeds() -> None:
    described = parse_model("layers=8,hidden=4096,heads=32,sequence=4096,vocabulary=32000")
    gpus = parse_gpus("h100:2,a100:1")
    speeds = speeds_of_gpus(gpus, described.model, described.execution())
    assert speeds is not None and speeds.values[:2] == (1.0, 1.0)
    peaks = GPUS["a100"].rates().linear / GPUS["h100"].rates().linear
    assert 0.8 * peaks < speeds.values[2] < 1.3 * peaks
    assert speeds_of_gpus(parse_gpus("h100:3"), described.model, described.execution()) is None
    assert parse_gpus("h100") == (GPUS["h100"],)
    with pytest.raises(ValueError, match="0 is not a number of pipeline ranks"):
        parse_gpus("h100:0,a100:2")
    both = product_of([RankSpeeds((1.0, 0.5)), None, RankSpeeds((2.0, 1.0))], 2)
    assert both == RankSpeeds((2.0, 0.5)) and product_of([None], 2) is None


def test_a_new_order_makes_up_for_a_slow_link() -> None:
    fixed, found = uneven.with_slow_link(1, 15.0, "zb-auto", microbatches=12, ranks=4)
    assert fixed > 1.2 and found < fixed - 0.05


def test_a_divided_vocabulary_leaves_the_tower_on_the_first_stage() -> None:
    """Layers are balanced with the time of an image encoder on the first stage, also if the
    vocabulary is split over the ranks.

    With a split vocabulary, layers used to be balanced as if the encoder took no time.
    """
    costs = parse_costs("f=10,i=12,w=8,output_layer=20/24/16,tower=5/6/4", line(2))
    figures = StageFigures(given_work(costs, 8, ranks=2, microbatches=6))
    assert figures.tower_seconds == 15
    found = least_slowest_stage(8, line(2), figures, with_ends=False)
    assert found.layers == (3, 5)


def test_layers_of_given_costs_have_their_slices() -> None:
    """Costs that a user gives have attention, fixed seconds, and keys and values of slices in every
    layout of the layers. They used to have them in the given layout only."""
    costs = parse_costs("f=9,i=6,w=3,attention=0.5/0.2,fixed_f=3/6,fixed_w=1", line(2))
    costs = costs.with_slices(keys_values=(8.0, 16.0))
    work = given_work(costs, 8, ranks=2, microbatches=6)
    stages = Layout((2, 6)).of(work.model)
    made = work.costs_of(stages, line(2), 4)
    assert made.slices.fixed == {
        Kind.FORWARD: (9 / 4, 27 / 4),
        Kind.BACKWARD_WEIGHT: (0.5, 1.5),
    }
    assert made.slices.keys_values == (6.0, 18.0)
    assert made.slices.attention == pytest.approx((0.35, 0.35))
