"""The evaluation's figures: one line for each kind of comparison, in groups.

Seconds of steps, ratios of two steps, orders, passes and sizes are compared, each on the
measurements that tell something about it. A line has one kind with its number of rows, so that no
figure hides behind another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from scripts.evaluation.gains import StepRatio, over_1f1b, overlaps, pairs_in_order
from scripts.evaluation.measured import PublishedStep
from scripts.evaluation.paper_times import simulated
from scripts.evaluation.predictions import (
    Percentiles,
    PredictedStep,
    by_group,
    predict,
)
from scripts.evaluation.sizes import OF_SIZES, orders, pairs_of_sizes, predict_sizes
from scripts.evaluation.stage_times import (
    PublishedStage,
    ratios_by_pass,
)


@dataclass(frozen=True)
class Evaluation:
    """All figures of the evaluation.

    Attributes:
        steps: the published steps with their predictions.
        lines: the lines of the table.
        sizes: predicted ratios divided by measured ones, of pairs of steps with other sizes.
    """

    steps: Sequence[PredictedStep]
    lines: Sequence[FigureLine]
    sizes: Sequence[float]


@dataclass(frozen=True)
class FigureLine:
    """One line of the table.

    Attributes:
        kind: what is compared, such as seconds of a step. Lines of one kind follow one another.
        name: the group of rows, or the schedule.
        rows: number of rows or pairs.
        in_view: how many of them were known when a constant of the estimate was chosen.
        spread: percentiles of predicted over measured; None if only an order is compared.
        order: how many pairs are in the right order, and how many differ; None if no order is
            compared.
        worst: predicted over measured of the row that is the farthest off.
    """

    kind: str
    name: str
    rows: int
    in_view: int
    spread: Percentiles | None = None
    order: tuple[int, int] | None = None
    worst: float | None = None


def _line(kind: str, name: str, figures: Sequence[float], in_view: int = 0) -> FigureLine:
    worst = max(figures, key=lambda figure: abs(figure - 1))
    return FigureLine(kind, name, len(figures), in_view, Percentiles.of(figures), worst=worst)


SECONDS = "seconds of a step"
PEAKS = "peak of the fullest rank"
GAINS = "gain over 1F1B"
GAINS_GIVEN = "gain over 1F1B, simulated with the paper's pass times"
ORDER = "order of schedules of one job"
OVERLAP = "gain of a setting"
PASSES = "milliseconds of a pass"
SIZES = "order of sizes and microbatches"
AT_TP_8 = "predicted over measured seconds, at TP 8 over TP 1, in the median"


def evaluate_all(
    steps: Sequence[PublishedStep], stages: Sequence[PublishedStage], report: Callable[[], None]
) -> Evaluation:
    """Return all figures; ``report`` is called after each step and each of `OTHER_PARTS` others."""
    of_one_size = [step for step in steps if not step.job.startswith(OF_SIZES)]
    found = predict(of_one_size, report)
    lines = [*of_steps(found), *of_gains(found), *with_papers_times(of_one_size, stages)]
    report()
    ordered, sizes = of_sizes([step for step in steps if step not in of_one_size])
    lines += [*of_passes(stages), *ordered]
    report()
    return Evaluation(found, lines, sizes)


OTHER_PARTS = 2


def of_steps(found: Sequence[PredictedStep]) -> Iterator[FigureLine]:
    groups = by_group(found)
    for name, rows in groups.items():
        known = sum(one.step.in_view for one in rows)
        yield _line(SECONDS, name, [one.ratio for one in rows], known)
    for name, rows in groups.items():
        ratios = [one.peak_ratio for one in rows if one.peak_ratio is not None]
        if ratios:
            yield _line(PEAKS, name, ratios)


def of_gains(found: Sequence[PredictedStep]) -> Iterator[FigureLine]:
    for name, pairs in over_1f1b(found).items():
        yield _gain(GAINS, name, pairs)
    for prefix, name in (("zb ", "zero bubble"), ("vocab ", "vocabulary parallelism")):
        rows = [one for one in found if one.step.job.startswith(prefix)]
        right, pairs_of_job = pairs_in_order(rows)
        yield FigureLine(ORDER, name, pairs_of_job, 0, order=(right, pairs_of_job))
    for name, ratio in overlaps(found):
        known = ratio.first.step.in_view or ratio.second.step.in_view
        yield _line(OVERLAP, name, [1 + ratio.error], int(known))


def _gain(kind: str, name: str, pairs: Sequence[StepRatio]) -> FigureLine:
    return _line(kind, name, [1 + ratio.error for ratio in pairs])


def with_papers_times(
    steps: Sequence[PublishedStep], stages: Sequence[PublishedStage]
) -> Iterator[FigureLine]:
    for launch in (True, False):
        made = over_1f1b(simulated(steps, stages, launch=launch))
        for name, pairs in made.items():
            more = "and LAUNCH" if launch else "alone"
            yield _gain(GAINS_GIVEN, f"{name}, {more}", pairs)


def of_passes(stages: Sequence[PublishedStage]) -> Iterator[FigureLine]:
    known = ratios_by_pass([stage for stage in stages if stage.in_view])
    for (method, pass_), ratios in ratios_by_pass(stages).items():
        in_view = len(known.get((method, pass_), ()))
        yield _line(PASSES, f"{pass_}, {method}", ratios, in_view)


def of_sizes(steps: Sequence[PublishedStep]) -> tuple[list[FigureLine], list[float]]:
    """Return the lines on ``steps`` that differ in sizes.

    Predicted ratios of pairs of such steps, divided by the measured ones, follow the lines.
    """
    predicted = {step: predict_sizes(step) for step in steps}
    lines = [
        FigureLine(SIZES, f"Llama 13B to 65B on A100s, {name}", order[1], order[1], order=order)
        for name, order in orders(predicted).items()
    ]
    ratios = [
        (predicted[a].seconds / predicted[b].seconds) / (a.seconds / b.seconds)
        for a, b in pairs_of_sizes(predicted)
    ]
    lines.append(_line(SIZES, "the slower over the faster of them", ratios, len(ratios)))
    ran = [step for step in steps if step.ran]

    def at(ranks: int) -> float:
        return median(
            predicted[step].seconds / step.seconds for step in ran if step.size("tp") == ranks
        )

    if {1, 8} <= {step.size("tp") for step in ran}:
        lines.append(_line(SIZES, AT_TP_8, [at(8) / at(1)], 1))
    return lines, ratios


def as_data(made: Evaluation) -> Mapping[str, object]:
    """Return all figures as data for other programs."""
    return {
        "steps": [
            {
                "id": one.step.number,
                "job": one.step.job,
                "schedule": one.step.schedule,
                "measured_seconds": one.step.seconds,
                "predicted_seconds": one.seconds,
                "measured_peak": one.step.peak,
                "predicted_peak": one.peak,
                "in_view": one.step.in_view,
            }
            for one in made.steps
        ],
        "lines": [
            {
                "kind": line.kind,
                "name": line.name,
                "rows": line.rows,
                "in_view": line.in_view,
                "median": line.spread and line.spread.median,
                "p10": line.spread and line.spread.p10,
                "p90": line.spread and line.spread.p90,
                "worst": line.worst,
                "right": line.order and line.order[0],
            }
            for line in made.lines
        ],
    }
