"""Bars of the evaluation: limits that its results must keep, whatever else changes.

A change of the estimate may make one group of measurements better and another one worse. Each kind
of comparison therefore has a bar, so that none is given away for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from scripts.evaluation import tables
from scripts.evaluation.gains import ADAPTED, TRAINED
from scripts.evaluation.predictions import GLM
from scripts.evaluation.tables import FigureLine


@dataclass(frozen=True)
class FigureBar:
    """Bar for the lines of a ``kind`` in the evaluation's table whose names begin with ``prefix``.

    Attributes:
        text: what the bar demands, in words.
        least, most: bounds of the median of a line's figures.
        each: bounds of every figure.
        right: share of the rows or pairs that have to be right.
        is_open: whether the bar is known to be missed.
    """

    text: str
    kind: str
    prefix: str = ""
    least: float = 0.0
    most: float = inf
    each: tuple[float, float] = (0.0, inf)
    right: float = 0.0
    is_open: bool = False

    def missed_by(self, lines: Sequence[FigureLine]) -> str:
        """Return the figures of ``lines`` that miss this bar, in words; "" if none does."""
        missed = []
        for line in self._judged(lines):
            if line.spread is not None and not self.least <= line.spread.median <= self.most:
                missed.append(f"{line.name}: median {line.spread.median:.3f}")
            outside = [one for one in line.figures if not self.each[0] <= one <= self.each[1]]
            if outside:
                missed.append(f"{line.name}: {min(outside):.3f} to {max(outside):.3f}")
            if line.order is not None and line.order[0] < self.right * line.order[1]:
                missed.append(f"{line.name}: {line.order[0]} of {line.order[1]}")
        return "; ".join(missed) if self._judged(lines) else "no such line"

    def verdict(self, lines: Sequence[FigureLine]) -> str:
        """Return text that says whether ``lines`` meet this bar, with the figures that count."""
        words = "missed" if self.missed_by(lines) else "met"
        return f"{words}{', open' * self.is_open}: {self.text} ({self._figures(lines)})"

    def _judged(self, lines: Sequence[FigureLine]) -> list[FigureLine]:
        return [one for one in lines if one.kind == self.kind and one.name.startswith(self.prefix)]

    def _figures(self, lines: Sequence[FigureLine]) -> str:
        judged = self._judged(lines)
        if not judged:
            return "no such line"
        if self.right:
            orders = [line.order for line in judged if line.order is not None]
            return "; ".join(f"{right} of {all_}" for right, all_ in orders)
        if self.each == (0.0, inf):
            medians = [line.spread.median for line in judged if line.spread is not None]
            return f"medians {_range(medians)}"
        return _range([figure for line in judged for figure in line.figures])


def _range(figures: Sequence[float]) -> str:
    if not figures:
        return "no estimate"
    least, most = f"{min(figures):.2f}", f"{max(figures):.2f}"
    return least if least == most else f"{least} to {most}"


def _off(share: float) -> tuple[float, float]:
    """Return the bounds of figures that are off by ``share`` at most."""
    return 1 - share, 1 + share


BARS = (
    FigureBar(
        "all pairs of schedules of the zero-bubble paper are in the right order",
        tables.ORDER,
        "zero bubble",
        right=1.0,
    ),
    FigureBar(
        "so are all pairs of vocabulary parallelism",
        tables.ORDER,
        "vocabulary",
        right=1.0,
    ),
    FigureBar(
        "no gain of zb-h1 over 1F1B is off by more than 4 %",
        tables.GAINS,
        "zb-h1",
        each=_off(0.04),
    ),
    FigureBar(
        "nor zb-h2's, by more than 5 %",
        tables.GAINS,
        "zb-h2",
        each=_off(0.05),
    ),
    FigureBar(
        "no gain of interleaved over 1F1B is off by more than 4 %",
        tables.GAINS,
        "interleaved",
        each=_off(0.04),
    ),
    FigureBar(
        "nor with the paper's pass times and LAUNCH",
        tables.GAINS_GIVEN,
        "interleaved:vpp=3, and LAUNCH",
        each=_off(0.04),
    ),
    FigureBar(
        "the median of interleaved's is at most 2.5 % off",
        tables.GAINS,
        "interleaved",
        least=0.975,
        most=1.025,
    ),
    FigureBar(
        "no gain of a divided vocabulary over 1F1B is off by more than 3 %",
        tables.GAINS,
        "1f1b + vocab",
        each=_off(0.03),
        is_open=True,
    ),
    FigureBar(
        "none is off by more than 7 %",
        tables.GAINS,
        "1f1b + vocab",
        each=_off(0.07),
    ),
    FigureBar(
        "the median of these is at most 3 % off",
        tables.GAINS,
        "1f1b + vocab",
        least=0.97,
        most=1.03,
    ),
    FigureBar(
        "F of the zero-bubble paper's stages is at most 10 % off",
        tables.PASSES,
        "F, zero bubble",
        each=_off(0.1),
    ),
    FigureBar(
        "so is I",
        tables.PASSES,
        "I, zero bubble",
        each=_off(0.1),
    ),
    FigureBar(
        "so is W",
        tables.PASSES,
        "W, zero bubble",
        each=_off(0.1),
    ),
    FigureBar(
        "the gain of overlapping experts' messages is at most 2 % off",
        tables.OVERLAP,
        "overlap of experts",
        each=_off(0.02),
    ),
    FigureBar(
        "the gain of recomputing no layers, rather than all, is at most 2 % off",
        tables.OVERLAP,
        "full recompute",
        each=_off(0.02),
        is_open=True,
    ),
    FigureBar(
        "no peak of the zero-bubble paper is off by more than 11 %",
        tables.PEAKS,
        "zero bubble",
        each=_off(0.11),
    ),
    FigureBar(
        "none of its zb-h2, which is the automatic ZB-2p, is below 0.97 of the measured",
        tables.PEAKS,
        tables.AUTOMATIC,
        each=(0.97, inf),
    ),
    FigureBar(
        "no peak of vocabulary parallelism's artifact is off by more than 4 %",
        tables.PEAKS,
        "vocabulary parallelism, its artifact",
        each=_off(0.04),
    ),
    FigureBar(
        "seconds of the zero-bubble paper's steps are predicted at 0.8 to 1 of the measured, in "
        "the median",
        tables.SECONDS,
        "zero bubble",
        least=0.8,
        most=1.0,
    ),
    FigureBar(
        "93 % of the A100 pairs over 2 % are in the right order",
        tables.SIZES,
        "Llama 13B to 65B on A100s, pairs over 2 %",
        right=0.93,
    ),
    FigureBar(
        "97 % of those over 10 % are",
        tables.SIZES,
        "Llama 13B to 65B on A100s, pairs over 10 %",
        right=0.97,
    ),
    FigureBar(
        "predicted over measured seconds at TP 8 are at least 0.9 of those at TP 1",
        tables.SIZES,
        tables.AT_TP_8,
        least=0.9,
    ),
    FigureBar(
        "80 % of the seconds of containers from 26.06 on, and of cards but GLM's, are predicted at "
        "0.85 to 1.18 of the measured",
        tables.SECONDS,
        tables.NEW,
        right=0.8,
    ),
    FigureBar(
        "seconds on GB300 over those on GB200 are at most 8 % off",
        tables.GENERATIONS,
        tables.SAME_WORK,
        right=1.0,
        is_open=True,
    ),
    FigureBar(
        "MXFP8 takes 4 to 12 % longer than FP8 with one scale for a tensor, if all weights are "
        "trained",
        tables.SCALES,
        TRAINED,
        each=(1.04, 1.12),
    ),
    FigureBar(
        "with LoRA it takes less than 2 % longer",
        tables.SCALES,
        ADAPTED,
        each=(0.98, 1.02),
    ),
    FigureBar(
        "sparse attention has no estimate, or one within 1.5 times of the measured",
        tables.SECONDS,
        GLM,
        each=(1 / 1.5, 1.5),
    ),
)


def violations(lines: Sequence[FigureLine]) -> list[str]:
    """Return a text for each bar whose state is unexpected: missed although it is not declared
    open, or met although it is declared open."""
    return [
        f"{bar.verdict(lines)}; {bar.missed_by(lines) or 'it is no longer open'}"
        for bar in BARS
        if bool(bar.missed_by(lines)) is not bar.is_open
    ]
