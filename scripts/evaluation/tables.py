"""Results of the evaluation: one line for each kind of comparison, in groups.

Seconds of steps, ratios of two steps, orders, passes and sizes are compared, each on the
measurements that tell something about it. A line has one kind with its number of rows, so that no
number hides behind another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from scripts.evaluation.gains import (
    StepRatio,
    in_both_scales,
    on_both_generations,
    over_1f1b,
    overlaps,
    pairs_in_order,
)
from scripts.evaluation.measured import PublishedStep
from scripts.evaluation.paper_times import simulated
from scripts.evaluation.predictions import (
    CARDS,
    NEW_CONTAINERS,
    Percentiles,
    PredictedStep,
    by_group,
    group_of,
    predict,
)
from scripts.evaluation.sizes import OF_SIZES, orders, pairs_of_sizes, predict_sizes
from scripts.evaluation.stage_times import (
    PublishedStage,
    ratios_by_pass,
)


@dataclass(frozen=True)
class Evaluation:
    """All results of the evaluation.

    Attributes:
        steps: the published steps that have an estimate, with their predictions.
        unpredicted: the other published steps.
        lines: the lines of the table.
        sizes: predicted ratios divided by measured ones, of pairs of steps with other sizes.
    """

    steps: Sequence[PredictedStep]
    unpredicted: Sequence[PublishedStep]
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
        figures: predicted over measured, by row; () if only an order is compared.
        order: how many rows or pairs are right, and how many there are; None if no order is
            compared.
        is_estimated: whether there is an estimate of these rows.
    """

    kind: str
    name: str
    rows: int
    in_view: int
    figures: tuple[float, ...] = ()
    order: tuple[int, int] | None = None
    is_estimated: bool = True

    @property
    def spread(self) -> Percentiles | None:
        """Percentiles of the figures; None without figures."""
        return Percentiles.of(self.figures) if self.figures else None


def _line(kind: str, name: str, figures: Sequence[float], in_view: int = 0) -> FigureLine:
    return FigureLine(kind, name, len(figures), in_view, tuple(figures))


def _in_range(line: FigureLine, least: float, most: float) -> FigureLine:
    """Return ``line`` with the number of figures in it that are not below ``least`` and not above
    ``most``."""
    right = sum(least <= figure <= most for figure in line.figures)
    return replace(line, order=(right, line.rows))


SECONDS = "seconds of a step"
PEAKS = "peak of the fullest rank"
AUTOMATIC = "zero bubble's zb-h2, A100"
NEW = "containers from 26.06 on, and cards but GLM's: 0.85 to 1.18"
GENERATIONS = "seconds on GB300 over GB200"
SAME_WORK = "of one work in one container: 0.92 to 1.08"
SCALES = "predicted seconds in MXFP8 over those in FP8"
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
    """Return all results. ``report`` is called after each step, and after each of `OTHER_PARTS`
    further parts."""
    of_one_size = [step for step in steps if not step.job.startswith(OF_SIZES)]
    found = predict(of_one_size, report)
    predicted = {one.step.number for one in found}
    unpredicted = [step for step in of_one_size if step.number not in predicted]
    lines = [
        *of_steps(found, unpredicted),
        *of_machines(found),
        *of_gains(found),
        *with_papers_times(of_one_size, stages),
    ]
    report()
    ordered, sizes = of_sizes([step for step in steps if step not in of_one_size])
    lines += [*of_passes(stages), *ordered]
    report()
    return Evaluation(found, unpredicted, lines, sizes)


OTHER_PARTS = 2


def of_steps(
    found: Sequence[PredictedStep], unpredicted: Sequence[PublishedStep]
) -> Iterator[FigureLine]:
    groups = by_group(found)
    for name, rows in groups.items():
        yield _seconds(name, rows)
    for name in dict.fromkeys(map(group_of, unpredicted)):
        number = sum(group_of(step) == name for step in unpredicted)
        yield FigureLine(SECONDS, name, number, 0, is_estimated=False)
    new = [one for one in found if group_of(one.step).startswith((NEW_CONTAINERS, CARDS))]
    if new:
        yield _in_range(_seconds(NEW, new), 0.85, 1.18)
    automatic = [one for one in found if one.step.schedule.startswith("zb-h2")]
    for name, rows in [*groups.items(), (AUTOMATIC, automatic)]:
        ratios = [one.peak_ratio for one in rows if one.peak_ratio is not None]
        if ratios:
            yield _line(PEAKS, name, ratios)


def _seconds(name: str, rows: Sequence[PredictedStep]) -> FigureLine:
    known = sum(one.step.in_view for one in rows)
    return _line(SECONDS, name, [one.ratio for one in rows], known)


def of_machines(found: Sequence[PredictedStep]) -> Iterator[FigureLine]:
    """Yield the lines of the table on pairs of steps that differ in the GPU, or that have MXFP8's
    scales in one step and one scale for a tensor in the other."""
    pairs = on_both_generations(found)
    if pairs:
        known = sum(one.first.step.in_view or one.second.step.in_view for one in pairs)
        line = _line(GENERATIONS, SAME_WORK, [1 + one.error for one in pairs], known)
        yield _in_range(line, 0.92, 1.08)
    for name, pairs in in_both_scales(found).items():
        known = sum(one.first.step.in_view or one.second.step.in_view for one in pairs)
        yield _line(SCALES, name, [one.predicted for one in pairs], known)


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
    """Return all results as data for other programs."""
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
        "no_estimate": [step.number for step in made.unpredicted],
        "lines": [
            {
                "kind": line.kind,
                "name": line.name,
                "rows": line.rows,
                "in_view": line.in_view,
                "median": line.spread and line.spread.median,
                "p10": line.spread and line.spread.p10,
                "p90": line.spread and line.spread.p90,
                "figures": line.figures,
                "right": line.order and line.order[0],
            }
            for line in made.lines
        ],
    }
