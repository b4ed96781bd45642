"""Seconds and bytes that a training has printed into its log."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

FIGURE_LINES = (b"elapsed time per iteration", b"max allocated")  # of lines that have figures
_MOST = 10_000  # iterations that are read
_ITERATION = re.compile(
    r"\biteration +(\d+)/ *\d+ \|.*?elapsed time per iteration \((ms|s)\): ([\d.]{1,20})"
)
_MEMORY = re.compile(
    r"\[Rank (\d{1,9})\].*?memory \(MB\) \| allocated: ([\d.]{1,20}) \| max allocated: "
    r"([\d.]{1,20})"
)
_UNIT = {"ms": 1e-3, "s": 1.0}
_MEGABYTE = 2**20  # what Megatron calls MB


@dataclass(frozen=True)
class AllocatedBytes:
    """Bytes of tensors on a rank: after a step, and at the most."""

    after_step: float
    most: float


@dataclass(frozen=True)
class LogFigures:
    """Seconds and bytes that a training has measured.

    Attributes:
        seconds: of an iteration: the median, without the first one that was printed.
        ranks: bytes, by global rank.
    """

    seconds: float | None = None
    ranks: Mapping[int, AllocatedBytes] = field(default_factory=dict)


@dataclass
class FiguresReader:
    """Reads figures from the lines of a log."""

    seconds: list[float] = field(default_factory=list)
    ranks: dict[int, AllocatedBytes] = field(default_factory=dict)

    def take(self, text: str) -> None:
        if "elapsed time" in text and len(self.seconds) < _MOST:
            if found := _ITERATION.search(text):
                self.seconds.append(_number(found[3]) * _UNIT[found[2]])
        elif "max allocated" in text and (found := _MEMORY.search(text)):
            after_step, most = _number(found[2]) * _MEGABYTE, _number(found[3]) * _MEGABYTE
            self.ranks[int(found[1])] = AllocatedBytes(after_step, most)

    def figures(self) -> LogFigures:
        # The first iteration also compiles kernels and builds communicators.
        known = [seconds for seconds in self.seconds[1:] or self.seconds if seconds > 0]
        return LogFigures(statistics.median(known) if known else None, self.ranks)


def _number(text: str) -> float:
    """Return the number that ``text`` has; 0 if it is none, such as ``1.2.3``."""
    try:
        return float(text)
    except ValueError:
        return 0.0
