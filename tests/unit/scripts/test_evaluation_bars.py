"""Tests of the evaluation's bars (limits of its errors) and of the lines of its tables: open bars,
rows without an estimate, and pairs of steps."""

from __future__ import annotations

from scripts.evaluation.bars import BARS, violations
from scripts.evaluation.gains import ADAPTED, TRAINED, in_both_scales, on_both_generations
from scripts.evaluation.measured import read_measured
from scripts.evaluation.page import text_of
from scripts.evaluation.predictions import GLM, PredictedStep, predict
from scripts.evaluation.sizes import OF_SIZES
from scripts.evaluation.tables import FigureLine, of_steps

STEPS = read_measured()


def test_a_bar_that_is_open_has_to_be_missed() -> None:
    """A bar that the predictions are known to miss is marked as open. The evaluation accepts a
    missed bar only with this mark, and a met bar only without it."""
    bar = next(bar for bar in BARS if bar.is_open)
    off, right = (FigureLine(bar.kind, bar.prefix, 1, 0, (figure,)) for figure in (1.2, 1.0))
    assert bar.verdict([off]).startswith("missed, open: ")

    def unexpected(line: FigureLine) -> bool:
        return any(bar.text in text and "longer open" in text for text in violations([line]))

    assert not unexpected(off) and unexpected(right)


def test_rows_without_an_estimate_have_no_figure() -> None:
    """Rows with sparse attention have no prediction, since the model has no estimate. They used
    to be predicted as plain attention, at 0.2 to 5.4 times the measured seconds."""
    steps = [step for step in STEPS if step.job.startswith("card GLM")]
    assert len(steps) == 4 and predict(steps, lambda: None) == []
    lines = list(of_steps([], steps))
    assert [line.is_estimated for line in lines] == [False]
    assert f"| {GLM} | 4 | none | no estimate |" in text_of(lines, {})


def test_steps_are_paired_by_gpu_and_by_scales() -> None:
    """Seconds on GB300 are compared with those of the same work on GB200, whatever the layouts.
    Seconds with MXFP8 are compared with those with FP8 on the same layout."""
    steps = [step for step in STEPS if not step.job.startswith(OF_SIZES)]
    found = [PredictedStep(step, 2 * step.seconds, 1.0) for step in steps]
    pairs = on_both_generations(found)
    assert (18, 16) in {(one.second.step.number, one.first.step.number) for one in pairs}
    assert all(one.first.step.gpu == "DGX-GB300" and one.error == 0 for one in pairs)
    assert all("26.04" not in one.first.step.source for one in pairs)
    numbers = {
        name: {(one.first.step.number, one.second.step.number) for one in of}
        for name, of in in_both_scales(found).items()
    }
    assert numbers == {TRAINED: {(24, 23), (26, 25)}, ADAPTED: {(29, 28)}}
