"""Tests of plans that compare all families, and of the trace files that commands write."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate, step_seconds
from megatron_ext.compile.registry import Maturity, choose
from megatron_ext.observe.trace import write_trace
from megatron_ext.planner.candidate import Plan, VocabMethod, stable_of
from megatron_ext.planner.layouts.given import given_work
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.limits import least_time
from megatron_ext.planner.planner import all_specs, make_plan
from megatron_ext.planner.redistribution import redistribute
from megatron_ext.planner.training import Training
from megatron_ext.schedule.action import Action, Kind, slices_of
from megatron_ext.schedule.costs import Costs, VocabularyCosts, uniform
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement, line
from megatron_ext.schedule.problem import Problem, VocabularyParallel
from tests.helpers.few_families import specs_with_few_chunks
from tests.helpers.short_search import shorten_search

pytestmark = pytest.mark.search


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_search(monkeypatch)


@functools.cache
def plan(limit: float | None = None, specs: Callable[[], Iterable[str]] = all_specs) -> Plan:
    memory = None if limit is None else MemoryLimit(microbatches=limit)
    training = Training(4, 8, lambda placement: uniform(placement, 10, 12, 8, 1), limit=memory)
    return make_plan(training.variant, specs=[*specs()])


@pytest.mark.parametrize("vocabulary", VocabularyParallel)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_no_bound_is_above_what_a_step_takes(name: str, vocabulary: VocabularyParallel) -> None:
    """No lower bound exceeds the real step. A bound of 1f1b used to be 9 % longer than its step,
    whatever the order of its passes. Here I and W take less time right after one another, as with
    tensor parallelism, and the vocabulary is whole or split."""
    resolved = choose(name)
    placement = resolved.place(4)
    fused_backward_saving = (4 / placement.chunks,) * placement.stages
    costs = uniform(placement, 10, 12, 8).with_passes(fused_backward_saving=fused_backward_saving)
    problem = Problem(placement, 64, costs).with_options(vocab_parallel=vocabulary)
    program = build_program(resolved, problem)
    taken = step_seconds(program, program.problem.costs)
    assert 0.8 * taken < least_time(problem, resolved.traits.splits_backward) <= taken + 1e-9


def test_every_family_is_compared_or_says_why_not() -> None:
    made = plan()
    compared = {candidate.schedule for candidate in made.candidates}
    assert compared | {name for name, _ in made.refusals} == set(all_specs())
    makespans = [candidate.report.makespan for candidate in made.candidates]
    assert makespans == sorted(makespans)
    assert made.best is not None and made.best.maturity is Maturity.STABLE


def test_the_front_falls_in_memory_as_it_rises_in_time() -> None:
    front = [candidate.report for candidate in plan().front]
    assert [made.makespan for made in front] == sorted(made.makespan for made in front)
    assert [made.peak for made in front] == sorted((made.peak for made in front), reverse=True)
    for made in (candidate.report for candidate in stable_of(plan().candidates)):
        assert any(f.makespan <= made.makespan and f.peak <= made.peak for f in front), made


def test_a_limit_omits_what_does_not_fit() -> None:
    reports = [candidate.report for candidate in plan(4, specs_with_few_chunks).candidates]
    (gpipe,) = (made for made in reports if made.schedule == "gpipe")
    # gpipe stores all 8 microbatches unless some are recomputed.
    assert gpipe.recomputed and gpipe.peak <= 4
    assert gpipe.options.recompute.fit
    assert all(made.peak <= 4 for made in reports) and reports


def test_layers_are_redistributed_as_megatron_does() -> None:
    """Layers are moved between stages as Megatron does. 7 layers and the output layer on 4 stages
    become 2, 2, 2, and 1 with the output layer; 6 layers with embedding and output layer become 1,
    2, 2, 1."""
    costs = uniform(line(4), 7, 14, 21).with_vocabulary(VocabularyCosts((5, 6, 7), (1, 2)))
    seven = redistribute(costs, 7)
    assert seven.seconds[Kind.FORWARD] == (8 + 1, 8, 8, 4 + 5)
    assert seven.seconds[Kind.BACKWARD_WEIGHT] == (24 + 2, 24, 24, 12 + 7)
    assert sum(seven.seconds[Kind.BACKWARD_INPUT]) == sum(costs.seconds[Kind.BACKWARD_INPUT])
    six = redistribute(uniform(line(4), 6, 6, 6), 6)
    assert six.seconds[Kind.FORWARD] == (4, 8, 8, 4)
    with pytest.raises(ValueError, match=r"8 layers .* can split 7 or 10 layers in this way"):
        redistribute(costs, 8)


def test_slices_cost_the_same_on_redistributed_layers_as_on_a_given_layout() -> None:
    """On redistributed layers, slices cost what they cost in a layout with the same layers. Each
    stage used to keep the fixed seconds, and the bytes of keys and values, that it had with equally
    many layers on all stages."""
    fixed = dict.fromkeys((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), (0.7,) * 4)
    costs = uniform(line(4), 7, 14, 21).with_vocabulary(VocabularyCosts((5, 6, 7), (1, 2)))
    costs = costs.with_slices(attention=(0.25,) * 4, fixed=fixed, keys_values=(3.5,) * 4)
    work = given_work(costs, 7, ranks=4, microbatches=8)
    given = work.costs_of(Layout((2, 2, 2, 1)).of(work.model), line(4), 2)
    moved = redistribute(costs, 7)
    for stage in range(4):
        for kind in fixed:
            slices = [Action(stage, kind, one) for one in slices_of(3, (0.6, 1.0))]
            assert [moved.of(one) for one in slices] == [given.of(one) for one in slices]
    assert moved.slices == given.slices
    assert moved.slices.keys_values == (4, 4, 4, 2)


def test_each_treatment_of_the_output_layer_is_what_simulate_finds() -> None:
    def costs(placement: Placement) -> Costs:
        return parse_costs("f=10,i=12,w=8,comm=1,output_layer=10/12/8", placement)

    problem = Problem(line(4), 8, costs(line(4)))
    program = build_program(
        choose("zb-h1"), problem.with_options(vocab_parallel=VocabularyParallel.TWO)
    )
    two = simulate(program, program.problem.costs).makespan
    naive = simulate(build_program(choose("zb-h1"), problem), problem.costs).makespan
    variant_of = Training(4, 8, costs, layers=9).variant
    made = make_plan(lambda name, method: variant_of(name, method) if name == "zb-h1" else None)
    steps = {candidate.method: candidate.step for candidate in made.candidates}
    assert (steps[VocabMethod.NAIVE], steps[VocabMethod.TWO]) == (naive, two)
    assert steps[VocabMethod.ONE] < naive and VocabMethod.REDISTRIBUTED not in steps
    why = made.refusals["zb-h1", VocabMethod.REDISTRIBUTED]
    assert "cannot be split evenly over 4 stages" in why
    assert plan().methods == (VocabMethod.NAIVE,)


def test_a_trace_has_every_pass_and_message(tmp_path: Path) -> None:
    resolved = choose("zb-h1")
    placement = resolved.place(3)
    problem = Problem(placement, 4, uniform(placement, 1, 1, 1, 0.5))
    program = build_program(resolved, problem)
    timeline = simulate(program, problem.costs)
    write_trace([timeline], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(event["cat"] == "compute" for event in spans) == 3 * 4 * 3
    assert sum(event["cat"] == "send" for event in spans) == 2 * 4 * 2
    (first,) = [event for event in spans if event["name"] == "1F0"]
    assert (first["pid"], first["ts"], first["dur"]) == (1, 1500.0, 1000.0)
    assert max(e["args"]["microbatches"] for e in events if e["ph"] == "C") == 3
