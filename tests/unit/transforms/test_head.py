"""Tests of whether the output layer's weight gradient is computed in I or waits for W
(`compile.output_layer`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ext.compile.output_layer import (
    costs_in,
    output_layer_waits,
    place_output_layer,
    with_input_gradient,
)
from megatron_ext.compile.program.memory import in_bytes, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.gpus import GPU
from megatron_ext.cost_model.model import stages_of
from megatron_ext.cost_model.short_form import Described
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, uniform
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Problem

EVEN, LIGHT_END = (4, 4, 4, 4), (6, 6, 6, 2)
LINE = choose("zb-h1")
V = choose("zb-v")


def problem(costs: Costs, limit: int | None = None, spec: str = "zb-h1") -> Problem:
    held = None if limit is None else MemoryLimit(bytes=limit)
    return Problem(choose(spec).place(4), 8, costs, held)


def costs_of(layers: tuple[int, ...], depths: int = 0) -> Costs:
    gpt = Described(sum(layers), hidden=2048, heads=16, sequence=2048, vocabulary=50304)
    model = replace(gpt.model, mtp_num_layers=depths)
    return estimate(model, stages_of(model, layers), gpt.execution(), GPU)


def on_v() -> Costs:
    """Return the costs of the eight stages of a V placement."""
    return costs_of((2,) * 8)


def test_it_waits_on_a_rank_that_holds_less_than_others() -> None:
    """The output layer's weight gradient waits for W on a rank that holds less than others. Here
    the last rank has one layer fewer, as is usual with a large vocabulary, so it has memory
    left."""
    program = place_output_layer(LINE, problem(costs_of(LIGHT_END)))
    assert output_layer_waits(program)
    held = peaks(program.schedule, in_bytes(program.problem.costs))
    assert held[-1] <= max(held[:-1])


def test_it_comes_with_the_input_gradient_where_all_ranks_hold_the_same() -> None:
    costs = on_v()
    program = place_output_layer(V, problem(costs, spec="zb-v"))
    assert not output_layer_waits(program)
    own = program.problem.costs
    assert own.held_bytes is not None and costs.held_bytes is not None
    assert costs.vocabulary is not None
    deferred = costs.vocabulary.deferred_bytes
    of_w = Held.WEIGHT_INPUTS
    assert own.held_bytes[of_w][-1] == pytest.approx(costs.held_bytes[of_w][-1] - deferred)
    gradient = costs.vocabulary.output_layer[2]
    for kind, more in ((Kind.BACKWARD_INPUT, gradient), (Kind.BACKWARD_WEIGHT, -gradient)):
        assert own.seconds[kind][-1] == pytest.approx(costs.seconds[kind][-1] + more)
        assert own.seconds[kind][:-1] == costs.seconds[kind][:-1]


def test_a_limit_in_bytes_decides() -> None:
    """A limit in bytes decides whether the output layer's weight gradient waits. Under the schedule
    2bp the logits of all microbatches would stay until the end of the step."""
    costs, all_at_the_end = costs_of(EVEN), choose("2bp")
    with_room = place_output_layer(all_at_the_end, problem(costs, 2**40))
    assert output_layer_waits(with_room)
    peak = max(peaks(with_room.schedule, in_bytes(costs)))
    tight = place_output_layer(all_at_the_end, problem(costs, int(0.99 * peak)))
    assert not output_layer_waits(tight)
    assert max(peaks(tight.schedule, in_bytes(tight.problem.costs))) < 0.99 * peak


def test_it_waits_only_where_that_is_sooner() -> None:
    costs = costs_of(LIGHT_END)
    program = place_output_layer(LINE, problem(costs))
    at_once = place_output_layer(LINE, problem(costs.with_passes(held_bytes=None)))
    assert output_layer_waits(program) and not output_layer_waits(at_once)
    sooner, later = (simulate(p, p.problem.costs) for p in (program, at_once))
    assert sooner.makespan < later.makespan


def test_it_does_not_wait_where_it_cannot() -> None:
    """The output layer's weight gradient does not wait in two cases: multi-token prediction also
    uses the same weight, or the costs of the output layer have no time of W."""
    costs = costs_of(LIGHT_END, depths=1)
    assert output_layer_waits(place_output_layer(LINE, problem(costs, 2**40)))
    at_once = with_input_gradient(costs)
    assert with_input_gradient(at_once) == at_once
    program = place_output_layer(LINE, problem(at_once, 2**40))
    assert not output_layer_waits(program) and program.problem.costs == at_once
    assert costs_in(program, at_once) == at_once


@pytest.mark.parametrize("spec", ["1f1b", "zb-h1"])
def test_nothing_waits_where_nothing_is_known(spec: str) -> None:
    costs = uniform(choose(spec).place(4), 1, 1, 1)
    program = place_output_layer(choose(spec), problem(costs, spec=spec))
    assert not output_layer_waits(program)
    assert program.problem.costs == costs
