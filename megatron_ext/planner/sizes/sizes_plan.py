"""The plan of a job over all parallel sizes: four answers, and what our schedules add.

A gain over the launch may come from better sizes, from a better schedule, or both. The plan
therefore has four answers, from Megatron's schedules or all schedules, and from checked sizes or
any sizes, so that one can see what our schedules add.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.planner.candidate import ALIKE
from megatron_ext.planner.sizes.sizes import Sizes
from megatron_ext.planner.spread import ComparisonKind, GainSpread
from megatron_ext.planner.verdict import NOTHING, WORTH, Alternative, Written

_NONE = Sizes()


@dataclass(frozen=True, eq=False)
class SizedAlternative(Alternative):
    """Alternative that trains the job with other parallel sizes.

    Attributes:
        sizes: parallel sizes and micro-batch.
        title: the sizes in words.
        recompute: the recompute of layers by Megatron, in words.
        passes: seconds of a step that a rank computes, as the mean of all ranks.
        not_checked: the parts of the estimate that no measurement has checked.
        adds_unchecked: whether the unchanged job does not have these parts in the same way.
    """

    sizes: Sizes = _NONE
    title: str = ""
    recompute: str = ""
    passes: float = 0.0
    not_checked: tuple[str, ...] = ()
    adds_unchecked: bool = False


def is_tie(one: Alternative, best: Alternative) -> bool:
    """Return whether the estimated steps of two alternatives are too close to tell them apart.

    ``best`` takes no more time than ``one``.
    """
    return one.seconds <= (1 + ALIKE) * best.seconds


@dataclass(frozen=True, eq=False)
class SizesPlan:
    """Plan of a job over all parallel sizes. Each answer is None if nothing fits.

    Attributes:
        job: the job in words, with its schedule.
        baseline: the unchanged job, though it may not fit; None: it cannot run.
        same_sizes: the best with the job's own sizes.
        control: the best of Megatron's own schedules with any sizes.
        best: the best of all schedules with any sizes.
        checked: the best whose estimate has no more unchecked parts than the job's own, if ``best``
            has more.
        compared: number of sizes that were compared.
        excess: bytes that the unchanged job takes more than a rank may.
        written: flags for the best; none if the job does not change.
        command: the launch command for the best; "" if there is none.
        remarks: assumptions and further facts.
    """

    job: str
    baseline: SizedAlternative | None
    same_sizes: SizedAlternative | None
    control: SizedAlternative | None
    best: SizedAlternative | None
    checked: SizedAlternative | None = None
    compared: int = 0
    excess: float = 0.0
    written: Written = NOTHING
    command: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def added(self) -> float | None:
        """How much shorter the best step is than that of Megatron's own schedules (`control`).

        This is a share of the control's step; None if one of the two is unknown.
        """
        if self.control is None or self.best is None:
            return None
        return 1 - self.best.seconds / self.control.seconds

    @property
    def is_large(self) -> bool:
        """Whether the gain over the unchanged job is so large that its causes should be checked."""
        return self.gain > 1 - 1 / _LARGE

    @property
    def gain(self) -> float:
        """Share of the unchanged job's step time that the best parallel sizes save."""
        if self.baseline is None or self.best is None:
            return 0.0
        return 1 - self.best.seconds / self.baseline.seconds

    @property
    def keeps(self) -> bool:
        """Whether the plan recommends no change of the job."""
        fits = self.baseline is not None and not self.excess
        return self.best is None or (fits and self.gain < WORTH)

    @property
    def spread(self) -> GainSpread | None:
        """How far the predicted gain may be off; None if no gain is worth a change."""
        if self.keeps or self.gain <= 0:
            return None
        return GainSpread.of("the gain", self.gain, {ComparisonKind.SIZES})


_LARGE = 1.3  # gain (a factor) that is suspicious, since public launch commands were tuned
