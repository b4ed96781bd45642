"""How far predicted gains were from measured ones, by the kind of comparison.

A gain is the ratio of two predicted steps, in which the errors of both partly cancel. The error
that is left depends on how the two trainings differ. The numbers are those that `python -m
scripts.evaluation` prints: the share by which 90 % of the predicted ratios of measured pairs of
steps are off at most. docs/estimated-costs.md has the table behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from megatron_ext.base.words import counted


class ComparisonKind(StrEnum):
    """Differences between two trainings whose predicted steps are compared."""

    SCHEDULES = "the schedule"
    LAYOUTS = "the layers of stages"
    VOCABULARY = "a divided vocabulary"
    SIZES = "parallel sizes or microbatch"
    OVERLAP = "the overlap of experts' messages"


@dataclass(frozen=True)
class ErrorSpread:
    """How far predicted ratios of two steps were off in one kind of comparison.

    Attributes:
        share: 90 % of the predicted ratios are off by at most this share of the measured ratio.
        pairs: number of measured pairs of steps.
        source: publication of the measurements.
    """

    share: float
    pairs: int
    source: str


# The spreads of VOCABULARY and OVERLAP were computed before constants were taken from the same
# rows, or from stage times of the same trainings; computed today they would be 4.7 % and 1.0 %. The
# spread of SCHEDULES is from before the paper's rows named zb-h2 were found to be ZB-2p's; computed
# today it would be 1.9 %.
SPREADS: Mapping[ComparisonKind, ErrorSpread] = {
    ComparisonKind.SCHEDULES: ErrorSpread(0.053, 36, "zero-bubble paper, A100"),
    ComparisonKind.LAYOUTS: ErrorSpread(0.030, 5, "vocabulary parallelism, A100"),
    ComparisonKind.VOCABULARY: ErrorSpread(0.123, 16, "vocabulary parallelism, A100"),
    ComparisonKind.SIZES: ErrorSpread(0.123, 243, "Hagemann et al. 2023, A100"),
    ComparisonKind.OVERLAP: ErrorSpread(0.062, 2, "Megatron-LM #6311, H100"),
}


def widest(kinds: Iterable[ComparisonKind]) -> tuple[ComparisonKind, ErrorSpread]:
    """Return the kind of comparison whose predictions were furthest off, with its spread."""
    return max(((kind, SPREADS[kind]) for kind in kinds), key=lambda one: one[1].share)


@dataclass(frozen=True)
class GainSpread:
    """Predicted gain, with how far predictions of its kind were off.

    Attributes:
        part: "the gain" over the unchanged job, or "the part by ours" that is added to Megatron's
            own flags.
        gain: share of the longer step.
        kind: the difference between the two trainings whose spread is the widest.
        share, pairs, source: as `ErrorSpread` has them.
        is_within: whether the gain may be none, since it is within the spread.
    """

    part: str
    gain: float
    kind: ComparisonKind
    share: float
    pairs: int
    source: str
    is_within: bool

    @classmethod
    def of(cls, part: str, gain: float, kinds: Iterable[ComparisonKind]) -> GainSpread:
        """Return a predicted ``gain`` with its spread, for trainings that differ in ``kinds``."""
        kind, spread = widest(kinds)
        is_within = abs(gain) <= spread.share
        return cls(part, gain, kind, spread.share, spread.pairs, spread.source, is_within)

    @property
    def text(self) -> str:
        """Sentence for a predicted gain that is within the spread of predictions."""
        assert self.is_within
        return (
            f"{self.part} may be none: of {counted(self.pairs, 'measured comparison')} that "
            f"differed in {self.kind}, one in ten was predicted {self.share:.1%} off or more"
        )
