"""Bars of the evaluation: what its figures must keep, whatever else changes.

A change of the estimate may make one group of measurements better and another one worse. Each kind
of comparison therefore has a bar, so that none is given away for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from scripts.evaluation import tables
from scripts.evaluation.tables import FigureLine


@dataclass(frozen=True)
class FigureBar:
    """Bar for the lines of a ``kind`` in the evaluation's table whose names begin with ``prefix``.

    Attributes:
        text: what the bar demands, in words.
        least, most: bounds of the median of predicted over measured.
        worst: share by which the worst row may be off.
        right: share of pairs of steps that have to be predicted in the right order.
    """

    text: str
    kind: str
    prefix: str = ""
    least: float = 0.0
    most: float = inf
    worst: float = inf
    right: float = 0.0

    def broken_by(self, lines: Sequence[FigureLine]) -> str:
        """Return in words which figures of ``lines`` break this bar; "" if none does."""
        broken = []
        matching = [
            one for one in lines if one.kind == self.kind and one.name.startswith(self.prefix)
        ]
        if not matching:
            return "no such line"
        for line in matching:
            if line.spread is not None and not self.least <= line.spread.median <= self.most:
                broken.append(f"{line.name}: median {line.spread.median:.3f}")
            if line.worst is not None and abs(line.worst - 1) > self.worst:
                broken.append(f"{line.name}: worst {line.worst:.3f}")
            if line.order is not None and line.order[0] < self.right * line.order[1]:
                broken.append(f"{line.name}: {line.order[0]} of {line.order[1]}")
        return "; ".join(broken)


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
        worst=0.04,
    ),
    FigureBar(
        "nor zb-h2's, by more than 5 %: the paper's schedule is ZB-2p, an automatic one",
        tables.GAINS,
        "zb-h2",
        worst=0.05,
    ),
    FigureBar(
        "no gain of interleaved over 1F1B is off by more than 4 %",
        tables.GAINS,
        "interleaved",
        worst=0.04,
    ),
    FigureBar(
        "nor with the paper's pass times and LAUNCH",
        tables.GAINS_GIVEN,
        "interleaved:vpp=3, and LAUNCH",
        worst=0.04,
    ),
    FigureBar(
        "the median of interleaved's is at most 2.5 % off",
        tables.GAINS,
        "interleaved",
        least=0.975,
        most=1.025,
    ),
    FigureBar(
        "no gain of a divided vocabulary over 1F1B is off by more than 7 %",
        tables.GAINS,
        "1f1b + vocab",
        worst=0.07,
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
        worst=0.1,
    ),
    FigureBar(
        "so is I",
        tables.PASSES,
        "I, zero bubble",
        worst=0.1,
    ),
    FigureBar(
        "so is W",
        tables.PASSES,
        "W, zero bubble",
        worst=0.1,
    ),
    FigureBar(
        "the gain of overlapping experts' messages is at most 2 % off",
        tables.OVERLAP,
        "overlap of experts",
        worst=0.02,
    ),
    FigureBar(
        "no peak of the zero-bubble paper is off by more than 11 %",
        tables.PEAKS,
        "zero bubble",
        worst=0.11,
    ),
    FigureBar(
        "no peak of vocabulary parallelism's artifact is off by more than 4 %",
        tables.PEAKS,
        "vocabulary parallelism, its artifact",
        worst=0.04,
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
)
