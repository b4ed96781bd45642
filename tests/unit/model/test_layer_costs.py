"""Tests of costs by layer type, which are computed from the times of stages, and of estimates
scaled to them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.links import crosses_a_node, with_links
from megatron_ext.cost_model.measured.file import as_data, load_measured
from megatron_ext.cost_model.measured.layer_costs import (
    Basis,
    LayerCosts,
    alike_remark,
    layer_costs,
)
from megatron_ext.cost_model.measured.least_squares import fit_scales
from megatron_ext.cost_model.measured.scale import OUTPUT_LAYER, PASS, Links, Measured, Scale
from megatron_ext.cost_model.measured_costs import Machine, RankFigures
from megatron_ext.cost_model.model import Model, stages_of
from megatron_ext.cost_model.rates import Rates
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, TowerCosts, uniform
from megatron_ext.schedule.costs_text import load_costs, save_costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import line, loop, v
from megatron_ext.schedule.problem import Problem
from megatron_ext.search.bounds import lower_bound
from megatron_ext.search.weight_gradient_filling import time

DENSE, EXPERTS = "*-", "*E"
NOTHING = Machine(links={}, ranks_of_node=1, reserved=None)


# ---- least squares


def test_parts_that_sums_separate_are_found() -> None:
    expected = np.array([[4.0, 0, 0], [2, 3, 0], [0, 6, 0], [0, 5, 1]])
    fit = fit_scales(expected, expected @ [1.5, 2.0, 0.8])
    assert fit.scales == pytest.approx((1.5, 2.0, 0.8))
    assert not fit.alike


def test_parts_that_no_sum_separates_keep_their_proportions() -> None:
    """Parts of a model keep their estimated proportions to each other if no measured sum separates
    their times, even if other parts are separated."""
    expected = np.array([[4.0, 1, 0], [4, 1, 2], [8, 2, 3]])
    fit = fit_scales(expected, expected @ [2.0, 2.0, 0.5])
    assert fit.scales == pytest.approx((2.0, 2.0, 0.5))
    assert fit.alike == ((0, 1),)


def test_parts_that_are_partly_separated_add_up_to_the_measured_sums() -> None:
    """The scaled parts add up to the measured sums, even if the sums do not determine every part.
    Two stages have equal layers, the first an embedding and the last an output layer, so only two
    sums of the three parts are measured."""
    expected = np.array([[10.0, 1, 0], [10, 0, 4]])
    measured = np.array([12.0, 17.0])
    fit = fit_scales(expected, measured)
    assert expected @ fit.scales == pytest.approx(measured)
    assert fit.alike == ((0, 1, 2),)
    assert min(fit.scales) > 1 and max(fit.scales) < 1.6


def test_what_is_too_small_to_be_seen_is_scaled_as_the_rest() -> None:
    """A part that is too small to be measured gets the scale of the other parts. A scale of its own
    would be fitted to noise."""
    expected = np.array([[10.0, 0.01], [10, 0]])
    fit = fit_scales(expected, np.array([20.4, 20.0]))
    assert fit.scales[1] == pytest.approx(2.02, rel=0.01)


def test_a_disturbed_sum_makes_no_part_nothing_or_many_times_the_others() -> None:
    expected = np.array([[10.0, 0], [10, 0], [10, 1]])
    fit = fit_scales(expected, np.array([11.0, 11.0, 9.0]))
    assert fit.scales == pytest.approx((1.0, 0.25), rel=0.02)


def test_parts_of_which_nothing_was_measured_or_expected() -> None:
    assert fit_scales(np.ones((2, 2)), np.zeros(2)).scales == (0, 0)
    assert fit_scales(np.zeros((2, 1)), np.ones(2)).scales == (1,)


# ---- costs of stages

MODEL = Model(
    layers=(*[DENSE] * 3, *[EXPERTS] * 9),
    hidden_size=1024,
    num_attention_heads=8,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=4096,
    vocabulary=50_000,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=2048,
    untie_embeddings_and_output_weights=True,
)
RUN = Execution(sequence=2048, expert_parallel=4)
RATES = GPUS["h100"].rates()
TRUE = Measured(
    scales=(
        (DENSE, Scale(1.5, 1.4, 1.3, 1.2, 1.1)),
        (EXPERTS, Scale(0.8, 0.9, 0.7, 1.05, 1.0)),
        (OUTPUT_LAYER, Scale(1.2, 1.1, 1.0, 1.0, 1.0)),
        (PASS, Scale(1.4, 1.2)),
    ),
    others=Scale(),
)


def basis(counts: list[int]) -> Basis:
    return Basis(MODEL, stages_of(MODEL, counts), RUN, RATES)


def costs_of(counts: list[int], rates: Rates) -> Costs:
    return estimate(MODEL, stages_of(MODEL, counts), RUN, rates)


def in_file(costs: Costs, layers: LayerCosts | None, machine: Machine, folder: Path) -> Path:
    path = folder / "costs.json"
    save_costs(costs, path, as_data(layers, machine))
    return path


@pytest.mark.parametrize("is_divided", [False, True])
def test_layers_that_were_measured_in_one_layout_predict_another(
    is_divided: bool, tmp_path: Path
) -> None:
    counts, others = [2, 1, 2, 2, 1, 1, 2, 1], [4, 5, 3]
    costs = costs_of(counts, replace(RATES, measured=TRUE))
    layers = layer_costs(costs, basis(counts), is_divided=is_divided)
    read = load_measured(in_file(costs, layers, NOTHING, tmp_path))
    assert read is not None and read.stages == tuple(counts)
    told, true = costs_of(others, read.rates), costs_of(others, replace(RATES, measured=TRUE))
    for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        assert told.seconds[kind] == pytest.approx(true.seconds[kind], rel=0.01)
    assert told.held_bytes is not None and true.held_bytes is not None
    assert told.held_bytes[Held.ACTIVATION] == pytest.approx(
        true.held_bytes[Held.ACTIVATION], rel=0.01
    )
    assert "by layer type" in told.origin


TOWER = TowerCosts((3e-3, 4e-3, 2e-3), 2e9)


@pytest.mark.parametrize("is_divided", [False, True])
def test_an_encoder_is_what_the_first_stage_takes_beyond_its_layers(
    is_divided: bool, tmp_path: Path
) -> None:
    """An encoder's measured time is the part of the first stage's time that its layers do not
    explain; the other stages determine the layers. No costs by layer type used to be written for
    models with an encoder."""
    counts = [2, 1, 2, 2, 1, 1, 2, 1]
    measured = replace(TRUE, tower=TOWER)
    costs = costs_of(counts, replace(RATES, measured=measured))
    layers = layer_costs(costs, replace(basis(counts), has_tower=True), is_divided=is_divided)
    assert layers.tower is not None
    assert layers.tower.seconds == pytest.approx(TOWER.seconds, rel=0.05)
    assert layers.tower.activation == pytest.approx(TOWER.activation, rel=0.05)
    forwards = [9e-3, 10e-3, 14e-3]  # seconds of F of microbatches with fewer and with more images
    path = tmp_path / "costs.json"
    save_costs(replace(costs, tower=layers.tower), path, as_data(layers, NOTHING, forwards))
    read = load_measured(path)
    assert read is not None and read.rates.measured is not None
    of_file = read.rates.measured.tower
    assert of_file is not None and of_file.seconds == pytest.approx(layers.tower.seconds, rel=1e-5)
    told = json.loads(path.read_text())["layers"]["tower"]["forward by microbatch"]
    differences = [later - earlier for earlier, later in itertools.pairwise(told)]
    assert differences == pytest.approx([1e-3, 4e-3], rel=1e-3)
    assert told[1] == pytest.approx(layers.tower.seconds[0], rel=1e-3)
    stages = load_costs(path, line(8))
    assert stages.seconds[Kind.FORWARD] == pytest.approx(costs.seconds[Kind.FORWARD], rel=1e-4)
    elsewhere = costs_of([4, 5, 3], read.rates)
    assert elsewhere.tower == of_file
    assert "name it with --vision" in " ".join(read.remarks(MODEL))


def test_layers_in_the_same_mixture_everywhere_keep_the_estimates_proportions() -> None:
    """Layer types that all stages have in the same proportion keep the estimate's proportion, and a
    remark says so. Here each stage has one layer of each type."""
    model = replace(MODEL, layers=(DENSE, EXPERTS) * 4, vocabulary=0)
    stages = stages_of(model, [2] * 4)
    slower = Measured((), others=Scale(1.3, 1.3, 1.3))
    costs = estimate(model, stages, RUN, replace(RATES, measured=slower))
    layers = layer_costs(costs, Basis(model, stages, RUN, RATES), is_divided=False)
    for name in (DENSE, EXPERTS):
        ratio = layers.measured[name][Kind.FORWARD] / layers.estimated[name][Kind.FORWARD]
        assert ratio == pytest.approx(1.3)
    assert layers.alike == ((DENSE, EXPERTS, PASS),)
    assert alike_remark(layers.alike[0]) == (
        "no stage tells a layer *-, a layer *E and the fixed cost of a pass apart: they keep "
        "the proportions of the estimate"
    )


def test_a_layer_that_was_not_measured_is_scaled_as_the_others(tmp_path: Path) -> None:
    counts = [3, 3, 3, 3]
    costs = costs_of(counts, replace(RATES, measured=TRUE))
    layers = layer_costs(costs, basis(counts), is_divided=False)
    read = load_measured(in_file(costs, layers, NOTHING, tmp_path))
    assert read is not None and read.rates.measured is not None
    scale = read.rates.measured.of("M")
    assert 0.8 < scale.forward < 1.5
    assert not any("not measured" in remark for remark in read.remarks(MODEL))
    hybrid = replace(MODEL, layers=("M", DENSE))
    assert any("as all layers together: M" in remark for remark in read.remarks(hybrid))


def test_a_file_without_layers_is_read_as_ever(tmp_path: Path) -> None:
    costs = costs_of([6, 6], RATES)
    path = in_file(costs, None, NOTHING, tmp_path)
    assert load_measured(path) is None
    assert load_costs(path, line(2)).links.p2p_seconds == pytest.approx(
        costs.links.p2p_seconds, rel=1e-5
    )


def test_layers_that_are_not_understood_are_refused(tmp_path: Path) -> None:
    counts = [6, 6]
    costs = costs_of(counts, RATES)
    path = in_file(costs, layer_costs(costs, basis(counts), is_divided=False), NOTHING, tmp_path)
    data = json.loads(path.read_text())
    del data["layers"]["rates"]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="layers is not as --pipeline-costs profile writes it"):
        load_measured(path)


# ---- links between ranks


def test_links_within_a_node_and_between_nodes_are_two_figures(tmp_path: Path) -> None:
    """Measured messages give one speed within a node and one between nodes. Of four ranks on two
    nodes, 0-1 and 2-3 are within a node, and 1-2 is between nodes."""
    ranks = [
        RankFigures({}, {}, [1e-3], [1], "a", reserved=2.0**30),
        RankFigures({}, {}, [4e-3], [2], "a"),
        RankFigures({}, {}, [2e-3], [3], "b", reserved=3 * 2.0**30),
        RankFigures({}, {}, [], [], "b"),
    ]
    machine = Machine.of(ranks)
    assert machine.links == pytest.approx({False: 1.5e-3, True: 4e-3})
    assert (machine.ranks_of_node, machine.reserved) == (2, 3 * 2**30)
    costs = costs_of([6, 6], RATES)
    layers = layer_costs(costs, basis([6, 6]), is_divided=False)
    read = load_measured(in_file(costs, layers, machine, tmp_path))
    assert read is not None and read.reserved == 3 * 2**30
    words = "plan pp=2,m=4,layers=12,hidden=64,heads=4,sequence=64,vocabulary=256 --json"
    command = [*words.split(), "--gpu", "h100", "--costs", str(tmp_path / "costs.json")]
    planned = json.loads(CliRunner().invoke(app, command).stdout)
    free = planned["free"]
    assert free["reserved"] == 3 * 2**30 and not free["is_modelled"]
    again = costs_of([3, 3, 3, 3], read.rates)
    near, far = (again.links.message_bytes / speed for speed in read.rates.to_neighbours)
    assert (near, far) == pytest.approx((1.5e-3, 4e-3))
    linked = with_links(again, line(4), read.rates, 4, 1)
    assert linked.links.p2p_seconds_by_stage == pytest.approx((1.5e-3, 4e-3, 1.5e-3))
    assert linked.links.p2p_seconds == pytest.approx(7e-3 / 3)


def test_of_a_v_the_turn_takes_no_message() -> None:
    rates = replace(RATES, measured=Measured((), Scale(), Links(9e9, 1e9, 2)))
    costs = costs_of([2] * 6, rates)
    linked = with_links(costs, v(3), rates, ranks=3, stride=1)
    near, far = costs.links.message_bytes / 9e9, costs.links.message_bytes / 1e9
    assert linked.links.p2p_seconds_by_stage == pytest.approx((far, near, 0.0, near, far))


@pytest.mark.parametrize("spec", ["zb-1p", "interleaved-zb", "zb-v"])
def test_schedules_are_made_where_links_differ(spec: str) -> None:
    """Schedules can be built if messages take different times on different links. A plan used to
    end with an IndexError, because the code that places W read the time of a link behind the last
    stage."""
    rates = replace(RATES, measured=Measured((), Scale(), Links(9e9, 1e9, 2)))
    placement = choose(spec).place(3)
    costs = costs_of([12 // placement.stages] * placement.stages, rates)
    linked = with_links(costs, placement, rates, ranks=3, stride=1)
    assert len(set(linked.links.p2p_seconds_by_stage)) > 1
    problem = Problem(placement, 3, linked)
    assert simulate(build_program(choose(spec), problem), linked).makespan > 0


@pytest.mark.parametrize(("stride", "hops"), [(8, ()), (1, ())])
def test_links_that_are_all_alike_are_one_figure(stride: int, hops: tuple[float, ...]) -> None:
    costs = costs_of([3] * 4, RATES)
    linked = with_links(costs, loop(2, vpp=2), RATES, 2 * stride, stride)
    assert linked.links.p2p_seconds_by_stage == hops
    speed = RATES.to_neighbours[stride == 8]
    assert linked.links.p2p_seconds == pytest.approx(costs.links.message_bytes / speed)


def test_a_pair_crosses_where_any_pipeline_has_it_on_two_nodes() -> None:
    """A link between two pipeline ranks counts as a link between nodes if it is one in any
    pipeline. With pipelines of 3 ranks on nodes of 4, the second pipeline begins on the last rank
    of the first node."""
    assert crosses_a_node(frozenset([0, 1]), 4, 3, 6, 1)
    assert not crosses_a_node(frozenset([0, 1]), 8, 3, 6, 1)
    assert not crosses_a_node(frozenset([0, 1]), 4, 3, 3, 1)


def test_messages_take_what_their_own_link_takes() -> None:
    """A simulated message takes the time of its own link, for activations and for gradients. The
    lower bound of a step does not exceed the simulated time."""
    passes = uniform(line(3), 10, 10, 10, comm=3)
    costs = passes.with_links(p2p_seconds_by_stage=(1.0, 5.0))
    problem = Problem(line(3), 1, costs)
    timeline = simulate(build_program(choose("zb-h1"), problem), costs)
    assert timeline.makespan == 3 * 10 + 6 + 3 * 10 + 6 + 10
    assert lower_bound(problem, splits_backward=True) <= timeline.makespan
    sends = {str(e.action): e.end - e.start for e in timeline.events if "SEND" in str(e.action)}
    assert sends == {"0SEND_F0": 1, "1SEND_F0": 5, "2SEND_B0": 5, "1SEND_B0": 1}


@pytest.mark.parametrize("name", ["zb-h1", "1f1b"])
def test_an_order_is_timed_by_each_link(name: str) -> None:
    """The search for places of weight gradients uses the time of each link. It used to assume the
    mean for all messages, and put weight gradients into gaps that do not exist."""
    costs = uniform(line(4), 10, 10, 10, comm=5).with_links(p2p_seconds_by_stage=(1.0, 13.0, 1.0))
    problem, resolved = Problem(line(4), 8, costs), choose(name)
    exact = simulate(build_program(resolved, problem), costs).makespan
    assert time(resolved.build(problem).rows, problem).makespan == exact
