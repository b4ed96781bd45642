"""Tests of predictions from a trace of Megatron's own step, for a model with a heavy output layer.

A rank's work, with the output layer, used to be split evenly over its stages: the step of the
schedule zb-v was predicted to take 0.80 times as long as Megatron's, and took 0.99 times as long.
The times are simulated here, so that the right answers are known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.measured.scale import DEPTH
from megatron_ext.observe.fitted_parts import ModelParts
from megatron_ext.observe.trace import TracedStep, TraceFile, read_trace, traced_step
from megatron_ext.observe.trace_text import remarks
from megatron_ext.observe.traced_costs import traced_costs
from megatron_ext.observe.what_if import TracedCosts, WhatIf, weight_shares, what_if
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, PassCosts
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.stock_executor import STOCK_EXECUTOR

LAYERS, MICROBATCHES = 8, 8
LAYER, OUTPUT, EMBEDDING = (1.0, 1.2, 0.8), (4.0, 4.5, 3.5), (0.1, 0.0, 0.1)
Triple = tuple[float, float, float]


def true_costs(stages: int) -> Costs:
    """Return costs of stages with equally many layers; the first also has the embedding, the last
    the output layer."""
    rows = [[LAYERS // stages * part for part in LAYER] for _ in range(stages)]
    for stage, end in ((0, EMBEDDING), (-1, OUTPUT)):
        rows[stage] = [layers + part for layers, part in zip(rows[stage], end, strict=True)]
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    columns = zip(*rows, strict=True)
    return Costs(PassCosts(dict(zip(kinds, map(tuple, columns), strict=True))))


def parts(stages: int, output: float = 1.0, *, kinds: int = 1) -> ModelParts:
    """Return estimated model parts: a third of the true times, with an output layer ``output``
    times as heavy."""

    def estimated(triple: Triple, factor: float = 1.0) -> Triple:
        f, i, w = (figure * factor / 3 for figure in triple)
        return f, i, w

    names = [f"layer {number * kinds // LAYERS}" for number in range(LAYERS)]
    each = LAYERS // stages
    return ModelParts(
        tuple(tuple(names[at : at + each]) for at in range(0, LAYERS, each)),
        {name: estimated(LAYER) for name in dict.fromkeys(names)},
        {"embedding": estimated(EMBEDDING)},
        {"output layer": estimated(OUTPUT, output)},
    )


def seen(spec: str, ranks: int, estimate: ModelParts | None) -> TracedStep:
    """Return a simulated step of Megatron's own schedule, as a trace of it."""
    return step_of(spec, ranks, true_costs(choose(spec).place(ranks).stages), estimate)


def step_of(spec: str, ranks: int, costs: Costs, estimate: ModelParts | None) -> TracedStep:
    resolved = choose(spec)
    placement = resolved.place(ranks)
    timeline = simulate(build_program(resolved, Problem(placement, MICROBATCHES, costs)), costs)
    compute = tuple(event for row in timeline.compute for event in row)
    traced = traced_step(7, replace(timeline, events=compute), timeline, clock_error=0.0)
    shares = weight_shares(costs)
    return replace(traced, weight_shares=shares, executor=STOCK_EXECUTOR, parts=estimate)


def costs_of(step: TracedStep) -> TracedCosts:
    made = traced_costs([step])
    assert made is not None
    return made


def told(spec: str, ranks: int, estimate: ModelParts | None) -> WhatIf:
    return what_if(costs_of(seen(spec, ranks, estimate)))


def right_answer(spec: str, ranks: int) -> float:
    placement = choose(spec).place(ranks)
    costs = true_costs(placement.stages)
    program = build_program(choose(spec), Problem(placement, MICROBATCHES, costs))
    return simulate(program, costs).makespan


@pytest.mark.parametrize("output", [0.2, 1.0, 5.0])
@pytest.mark.parametrize(
    ("traced", "ranks", "others"),
    [
        ("1f1b", 2, ("zb-h1", "zb-v", "v-half")),
        ("1f1b", 4, ("zb-h1", "zb-v", "v-half")),
        ("interleaved:vpp=2", 2, ("interleaved-zb:vpp=2", "zb-h1", "zb-v", "v-half")),
    ],
)
def test_other_placements_take_what_was_said(
    traced: str, ranks: int, others: tuple[str, ...], output: float
) -> None:
    """The predicted step times of other placements are right to 5 %, whatever cost the estimate
    gives the output layer, because the measured passes separate the output layer from the
    layers."""
    found = told(traced, ranks, parts(choose(traced).place(ranks).stages, output))
    said = {each.schedule: each for each in (*found.within, *found.with_more)}
    for spec in others:
        assert said[spec].step == pytest.approx(right_answer(spec, ranks), rel=0.05), spec
        assert said[spec].low <= said[spec].step <= said[spec].high


def test_without_parts_all_is_cut_evenly() -> None:
    """Without known parts of the model, as for a caller's own model, all work of a rank is split
    evenly over its stages. The report says so."""
    found = told("1f1b", 2, None)
    assert not found.has_parts
    (v,) = [each for each in (*found.within, *found.with_more) if each.schedule == "zb-v"]
    assert v.step < 0.95 * right_answer("zb-v", 2)


def test_a_stage_of_ones_own_keeps_its_time() -> None:
    """A stage that exists under both placements keeps its measured time. For Megatron's own
    placement, and for others with as many stages, no time has to be fitted."""
    costs = costs_of(seen("1f1b", 2, parts(2, 5.0))).costs(2)
    assert costs is not None
    for kind, figures in true_costs(2).seconds.items():
        assert costs.seconds[kind] == pytest.approx(figures)


def test_parts_that_passes_do_not_separate_give_a_range() -> None:
    """The prediction has a wide range if measured passes do not separate the parts of the model.
    With another layer type on each stage, the last stage's passes do not separate its layers from
    the output layer, and the estimate's proportions may be wrong."""
    sure, unsure = (told("1f1b", 2, parts(2, kinds=kinds)) for kinds in (1, 2))

    def width(found: WhatIf) -> float:
        (v,) = [each for each in (*found.within, *found.with_more) if each.schedule == "zb-v"]
        assert v.low < right_answer("zb-v", 2) * 1.001 and v.high > 0.999 * right_answer("zb-v", 2)
        return (v.high - v.low) / v.step

    assert width(unsure) > 1.5 * width(sure)


DEPTH_SECONDS = (1.5, 1.8, 1.2)
# layers and depths of each stage, as in the layout Ett|ttt|tttm|L
OWN_STAGE = ((2, 0), (3, 0), (3, 1), (0, 0))


def costs_with_depth(stages: Sequence[tuple[int, int]]) -> Costs:
    """Return costs of ``stages``, each given as its number of layers and its number of depths of
    multi-token prediction. The output layer runs twice."""
    rows = []
    for number, (layers, depths) in enumerate(stages):
        ends = [(number == 0, EMBEDDING), (2 * (number == len(stages) - 1), OUTPUT)]
        of_stage = [(layers, LAYER), (depths, DEPTH_SECONDS), *ends]
        rows.append([sum(times * part[at] for times, part in of_stage) for at in range(3)])
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    columns = zip(*rows, strict=True)
    return Costs(PassCosts(dict(zip(kinds, map(tuple, columns), strict=True))))


@pytest.mark.parametrize("output", [0.5, 1.0, 2.0])
def test_multi_token_prediction_is_where_the_traced_stages_had_it(output: float) -> None:
    """The prediction knows on which stage the traced run had multi-token prediction. If it ran on a
    stage before that of the loss, its time used to be attributed to the last stage, whose output
    layer was therefore assumed to be shorter."""
    doubled = tuple(2 * part for part in parts(4, output).last["output layer"])
    estimate = ModelParts(
        tuple(("layer",) * layers + (DEPTH,) * depths for layers, depths in OWN_STAGE),
        {"layer": LAYER, DEPTH: DEPTH_SECONDS},
        {"embedding": EMBEDDING},
        {"output layer": (doubled[0], doubled[1], doubled[2])},
    )
    found = what_if(costs_of(step_of("1f1b", 4, costs_with_depth(OWN_STAGE), estimate)))
    assert found.has_depths
    said = {each.schedule: each for each in (*found.within, *found.with_more)}
    evenly = costs_with_depth([(1, 0)] * 7 + [(1, 1)])
    for spec in ("zb-v", "v-half"):
        resolved = choose(spec)
        program = build_program(resolved, Problem(resolved.place(4), MICROBATCHES, evenly))
        assert said[spec].step == pytest.approx(simulate(program, evenly).makespan, rel=0.02)
    assert "multi-token prediction on the last stage" in "\n".join(remarks(found))


def test_layers_that_cannot_be_cut_are_said() -> None:
    found = told("1f1b", 8, parts(8))
    assert "cannot be computed from the 8 measured stages" in found.excluded["zb-v"]


def test_a_trace_keeps_the_parts(tmp_path: Path) -> None:
    step = seen("1f1b", 2, parts(2))
    TraceFile(tmp_path / "trace.json").add(step)
    (read,) = read_trace(tmp_path)
    assert read.parts == step.parts
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert "embedding and the output layer stay at the ends" in result.stdout
    assert json.loads(CliRunner().invoke(app, ["trace", str(tmp_path), "--json"]).stdout)
    wrong = replace(step, parts=parts(4))
    TraceFile(tmp_path / "trace.json").add(wrong)
    with pytest.raises(
        ValueError, match="the table 'layers' has 4 rows, and the schedule has 2 stages"
    ):
        read_trace(tmp_path)
