"""Seconds and bytes that a training has printed into its log.

Megatron prints the time of its iterations and the memory of ranks. A plan of the same training
compares its estimate with these seconds and bytes.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

# Patterns of the parts of a log line that contain seconds or bytes.
FIGURE_LINES = (b"elapsed time per iteration", b"max allocated")
_MOST = 10_000  # largest number of iterations whose times are read
_ITERATION = re.compile(
    r"\biteration +(\d+)/ *\d+ \|.*?elapsed time per iteration \((ms|s)\): ([\d.]{1,20})"
)
_MEMORY = re.compile(
    r"\[Rank (\d{1,9})\].*?memory \(MB\) \| allocated: ([\d.]{1,20}) \| max allocated: "
    r"([\d.]{1,20})"
)
_UNIT = {"ms": 1e-3, "s": 1.0}
_MEGABYTE = 2**20  # bytes in what Megatron prints as MB


@dataclass(frozen=True)
class AllocatedBytes:
    """Bytes of tensors on a rank, as a training's log prints them: after a step, and at the
    peak."""

    after_step: float
    most: float


@dataclass(frozen=True)
class LogFigures:
    """Seconds and bytes that the log of a training tells.

    Attributes:
        seconds: median seconds of an iteration, without the first one in the log.
        ranks: bytes of tensors, by global rank.
    """

    seconds: float | None = None
    ranks: Mapping[int, AllocatedBytes] = field(default_factory=dict)


@dataclass
class FiguresReader:
    """Reader that finds seconds and bytes in the lines of a training's log."""

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
        # The first iteration is skipped, as it also compiles kernels and builds communicators.
        known = [seconds for seconds in self.seconds[1:] or self.seconds if seconds > 0]
        return LogFigures(statistics.median(known) if known else None, self.ranks)


def _number(text: str) -> float:
    """Return the number in ``text``; 0 if it is none, such as ``1.2.3``."""
    try:
        return float(text)
    except ValueError:
        return 0.0
