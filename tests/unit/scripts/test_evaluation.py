"""Tests of scripts/evaluation, which compares predictions with published step times."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.planner.spread import SPREADS, ComparisonKind
from scripts.evaluation import tables
from scripts.evaluation.__main__ import main
from scripts.evaluation.bars import BARS, violations
from scripts.evaluation.gains import StepRatio, over_1f1b, pairs_in_order
from scripts.evaluation.measured import MEASURED, read_measured
from scripts.evaluation.page import PAGE, PART, text_of
from scripts.evaluation.paper_times import simulated
from scripts.evaluation.predictions import PredictedStep, group_of, predict
from scripts.evaluation.sizes import OF_SIZES
from scripts.evaluation.spreads import measured_errors, spread_of
from scripts.evaluation.stage_times import ratios_by_pass, read_stages
from scripts.evaluation.tables import FigureLine, evaluate_all
from scripts.evaluation.trainings import recipe_of
from scripts.tables import with_part
from tests.helpers.combinations import nightly

STEPS = read_measured()
ZERO_BUBBLE = [step for step in STEPS if step.job == "zb GPT 1.5B m=24"]


def test_published_steps_are_read() -> None:
    assert len(STEPS) == 262 and len({step.number for step in STEPS}) == 262
    step = next(one for one in STEPS if one.number == 209)
    assert (step.pipeline, step.chunks, step.microbatches) == (8, 3, 24)
    assert step.layers == (0, *[1] * 22, 0) and sum(step.layers) == step.size("layers")
    assert step.seconds == 1.374 and step.peak == 40 * 2**30
    assert all(step.cells["source"] and step.cells["where_read"] for step in STEPS)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("pp", "8.5", "line 3: pp is '8.5': write a whole number from 1 on"),
        ("seconds", "-1", "line 3: seconds is '-1': write a number above 0"),
        ("seconds", "nan", "line 3: seconds is 'nan'"),
        ("layout", "1,2,3", "the layout has 3 stages, and the pipeline has 32"),
        ("where_read", "", "line 3: where_read is empty"),
        ("id", "1", "has the id 1 twice"),
    ],
)
def test_a_wrong_cell_is_named(tmp_path: Path, column: str, value: str, message: str) -> None:
    with MEASURED.open(newline="") as file:
        rows = list(csv.DictReader(file))[:2]
    rows[1] |= {"pp": "8", "vpp": "4", column: value}
    path = tmp_path / "steps.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(ValueError, match=message):
        read_measured(path)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("id,job\n1,one\n")
    with pytest.raises(ValueError, match="has no column source, where_read"):
        read_measured(path)


def test_one_job_is_predicted() -> None:
    """The evaluation can predict one job: the 1.5B model of the zero-bubble paper with 24
    microbatches, under its four schedules."""
    found = predict(ZERO_BUBBLE, lambda: None)
    assert len(found) == 4 and pairs_in_order(found) == (5, 5)
    # Predicted steps are too long: the vocabulary size is assumed, and with it the last stage is
    # estimated longer than the others.
    assert all(1.0 < one.ratio < 1.15 for one in found)
    assert all(one.peak_ratio and 0.85 < one.peak_ratio < 1.05 for one in found)
    gains = over_1f1b(found)
    assert set(gains) == {"zb-h1 + post-validation", "zb-h2 + post-validation", "interleaved:vpp=3"}
    assert all(abs(pair.error) < 0.06 for pairs in gains.values() for pair in pairs)
    whole = measured_errors(found, [1.1])
    assert len(next(iter(whole.values()))) == 6 and spread_of([0.01] * 9 + [-0.2]) > 0.01


def test_papers_pass_times_are_simulated() -> None:
    """The evaluation can simulate the pass times that papers print. The step of 1F1B is the sum of
    its passes and its bubble, and the schedule with more gain is faster."""
    stages = read_stages()
    alone = simulated(ZERO_BUBBLE, stages, launch=False)
    seconds = {one.step.schedule: one.seconds for one in alone}
    forward, backward = 18.522e-3, 18.086e-3 + 9.337e-3
    ideal = (24 + 7) * (forward + backward)
    assert ideal < seconds["1f1b"] < 1.03 * ideal
    assert seconds["zb-h2 + post-validation"] < seconds["zb-h1 + post-validation"] < ideal
    launched = simulated(ZERO_BUBBLE, stages, launch=True)
    assert all(a.seconds < b.seconds for a, b in zip(alone, launched, strict=True))


def test_stage_times_are_compared_by_pass() -> None:
    stages = read_stages()
    assert len(stages) == 22
    ratios = ratios_by_pass(stages)
    assert len(ratios["zero bubble", "W"]) == 6
    # The estimate's rates of an A100, and of its dropout, come from half of these rows.
    assert all(0.99 < ratio < 1.01 for ratio in ratios["zero bubble", "W"])
    assert all(0.9 < ratio < 1.02 for ratio in ratios["zero bubble", "F"])


def test_rows_in_view_are_those_that_stood_here() -> None:
    """Rows "in view" are those whose measured time was known when a constant of the estimate was
    chosen: 46 rows, besides those that compare sizes. No row of the papers on zero bubble and
    vocabulary parallelism is in view."""
    known = [step for step in STEPS if step.in_view and not step.job.startswith(OF_SIZES)]
    assert len(known) == 46
    assert not any(group_of(step).startswith(("zero bubble", "vocabulary")) for step in known)


def test_a_recipe_takes_the_sizes_of_its_row() -> None:
    """A recipe takes the sizes of its measured row. The row of DeepSeek-V3 on 16 ranks is from an
    older container, not from the recipe of today, which has 8 ranks."""
    step = next(one for one in STEPS if one.number == 70)
    recipe = recipe_of(step)
    assert (recipe.ranks, recipe.chunks, recipe.gpus, recipe.gpu) == (16, 1, 256, "b200")
    assert recipe.settings["precision"] == "fp8_mx"
    assert recipe.settings["expert_model_parallel_size"] == 8
    unknown = replace(step, cells={**step.cells, "recipe": "none"})
    with pytest.raises(ValueError, match="row 70 of the measured steps: 'none' is not a recipe"):
        recipe_of(unknown)


def step_of(seconds: float, predicted: float) -> PredictedStep:
    return PredictedStep(replace(ZERO_BUBBLE[0], seconds=seconds), predicted, 1.0)


def test_a_ratio_of_two_steps() -> None:
    ratio = StepRatio(step_of(2.0, 3.0), step_of(1.0, 1.2))
    assert ratio.error == pytest.approx(0.25) and ratio.is_right and ratio.differs
    assert not StepRatio(step_of(1.0, 3.0), step_of(1.01, 1.2)).differs


def test_a_bar_is_missed_by_its_lines_alone() -> None:
    bar = next(bar for bar in BARS if bar.kind == tables.GAINS and bar.prefix == "zb-h1")
    good = FigureLine(tables.GAINS, "zb-h1", 2, 0, (1.01, 1.02))
    other = FigureLine(tables.GAINS, "interleaved", 1, 0, (1.2,))
    assert bar.missed_by([good, other]) == ""
    assert bar.verdict([good, other]) == f"met: {bar.text} (1.01 to 1.02)"
    bad = replace(good, figures=(1.01, 0.9))
    assert bar.missed_by([bad]) == "zb-h1: 0.900 to 0.900"
    assert bar.verdict([bad]) == f"missed: {bar.text} (0.90 to 1.01)"
    assert bar.missed_by([other]) == "no such line"
    order = next(bar for bar in BARS if bar.kind == tables.ORDER)
    line = FigureLine(tables.ORDER, "zero bubble", 35, 0, order=(34, 35))
    assert order.missed_by([line]) == "zero bubble: 34 of 35"


def test_the_page_has_the_bars() -> None:
    written = PAGE.read_text()
    assert all(f": {bar.text} (" in written for bar in BARS)
    assert all(
        f"| {kind} | {one.pairs} | {one.share:.1%} |" in written for kind, one in SPREADS.items()
    )


@nightly("one job of them, by test_one_job_is_predicted")
def test_all_figures_keep_their_bars_and_stand_on_the_page() -> None:
    stages = read_stages()
    made = evaluate_all(STEPS, stages, lambda: None)
    assert violations(made.lines) == []
    errors = measured_errors(made.steps, made.sizes)
    for kind, of in errors.items():
        spread, here = SPREADS[kind], round(spread_of(of), 3)
        fresh = kind in (ComparisonKind.LAYOUTS, ComparisonKind.SIZES)
        assert len(of) == spread.pairs
        assert here == spread.share if fresh else here < spread.share, kind
    text = text_of(made.lines, errors)
    assert with_part(PAGE.read_text(), PART, text) == PAGE.read_text()


@pytest.mark.parametrize("words", ["recipes --write", "--file x.csv --write", "--keep-plans"])
def test_options_without_effect_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options with no effect, or a wrong one, are refused. With --file and --write, the numbers of
    that file used to be written into the page, whose numbers are those of measured.csv."""
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert "goes with" in capsys.readouterr().err
