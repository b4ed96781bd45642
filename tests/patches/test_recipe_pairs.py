"""What pairs of passes give recipes: orders with pairs timed by layout, and the table."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.output_layer import with_input_gradient
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.model_memory import TrainingState
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.planner.layouts.descent import Timed, descend
from megatron_ext.planner.layouts.figures import StageFigures
from megatron_ext.planner.layouts.layout import Layout, evenly
from megatron_ext.planner.layouts.order import Order
from megatron_ext.planner.layouts.work import evaluate
from megatron_ext.progress import Task
from scripts.recipes.gains import Configuration
from scripts.recipes.pairs.compared import Comparison, with_overlap
from scripts.recipes.pairs.page import page
from scripts.recipes.pairs.recipes import Candidate, compare

_DENSE = parse_model("layers=8,hidden=1024,heads=8,sequence=4096,vocabulary=32768")
MODEL = replace(
    _DENSE.model,
    layers=("*E",) * 8,
    num_experts=64,
    moe_router_topk=4,
    moe_ffn_hidden_size=1024,
)
EXECUTION = replace(_DENSE.execution(), expert_parallel=16, dispatcher="alltoall")
OWN = Layout((2, 2, 2, 2))
CONFIGURATION = Configuration(
    MODEL, EXECUTION, TrainingState(), "h100", 2, 32, "interleaved:vpp=2", OWN.layers
)
RATES = GPUS["h100"].rates(EXECUTION.precision)


@pytest.mark.parametrize("spec", ["interleaved:vpp=2", "interleaved-zb:vpp=2", "zb-v"])
def test_an_order_with_pairs_is_timed_as_it_is_simulated(spec: str) -> None:
    """Where messages take no time: there they do not wait for one another."""
    work = with_overlap(CONFIGURATION, RATES, 0.5, is_stock=False)
    figures, layouts = StageFigures(work), [OWN, Layout((3, 2, 2, 1))]
    problem = replace(work.variant(spec, OWN).problem, microbatches=8).with_extras(pairs=True)
    choice = work.variant(spec, OWN).choice
    program = build_program(choice, replace(problem, costs=with_input_gradient(problem.costs)))
    assert program.schedule.pairs
    passes = replace(program.schedule, rows=program.schedule.compute_rows)
    order = Order(passes, problem.costs.with_links(hop=0.0))
    counts = np.array([layout.layers for layout in layouts])
    seconds = order.seconds(figures, counts)
    for layout, of_layout in zip(layouts, seconds.tolist(), strict=True):
        costs = with_input_gradient(work.variant(spec, layout).problem.costs)
        made = simulate(program, costs.with_links(hop=0.0))
        assert of_layout == pytest.approx(made.makespan)


def test_a_layout_is_made_for_passes_in_pairs() -> None:
    """Layers were balanced on what they take alone: those with experts, which hide their messages,
    got too few beside dense ones."""
    model = replace(MODEL, layers=("*-",) * 3 + ("*E",) * 9, moe_router_topk=6)
    configuration = replace(
        CONFIGURATION, model=model, execution=replace(EXECUTION, expert_parallel=32)
    )
    in_pairs = with_overlap(configuration, RATES, 1.0, is_stock=False)
    steps = []
    for work in (in_pairs, replace(in_pairs, pairs=False)):
        make = partial(Timed, "interleaved-zb:vpp=2", figures=StageFigures(work), room=None)
        made = descend(make, evenly(12, 4), Task(""))
        steps.append(evaluate(in_pairs, made.spec, made.layout, search=False).seconds)
    assert steps[0] < 0.9 * steps[1]


def test_backward_passes_of_stock_hide_messages_behind_their_own_weight_gradients() -> None:
    stock, ours = (with_overlap(CONFIGURATION, RATES, 1.0, is_stock=s) for s in (True, False))
    of_stock, of_ours = (
        Comparison(work, None, ()).step("interleaved:vpp=2", OWN).seconds for work in (stock, ours)
    )
    assert of_stock < of_ours


def test_a_recipe_is_compared_at_each_share() -> None:
    result = compare(Candidate("with_experts", CONFIGURATION, "without shared experts' overlap"))
    best = [(found.stock, found.ours) for found in result.found]
    steps = [(stock.seconds, ours.seconds) for stock, ours in best if stock and ours]
    assert len(steps) == 3
    assert steps == sorted(steps, reverse=True)  # the more hides, the less a step takes
    assert result.stock_without is not None
    assert result.stock_without.seconds > steps[0][0]
    text = page([result])
    assert "| with_experts | 2 | 32 |" in text
    assert "- with_experts: without shared experts' overlap" in text
