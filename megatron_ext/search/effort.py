"""Effort of a search: the number of passes that it packs, and the packer of its plans.

The effort is counted in passes packed, so that a slow machine finds the same as a fast one. numba
packs about thirty times as many in the same time, so a search tries more where it is installed, and
finds another, better schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_ext.base.progress import remark
from megatron_ext.search import pack
from megatron_ext.search.job_shop import JobShop
from megatron_ext.search.pack import Pack

SMALL, LARGE = "small", "large"


@dataclass(frozen=True)
class Effort:
    """How many passes a search may place (pack) to improve the best of its plans.

    Attributes:
        name: `SMALL` or `LARGE`.
        packer: function that makes a packer for the plans of a packing problem.
        by_square: passes packed per square of the number of ranks, ...
        least: ... at least this many,
        most: ... and at most this many.
        patience: passes packed without a gain after which a search ends, or 1 / ``share`` of all
            passes if that is more.
        steps: most steps in which a plan is improved: a small problem has few plans.
    """

    name: str
    packer: Callable[[JobShop], Pack]
    by_square: int
    least: int
    most: int
    patience: int
    steps: int
    share: int = 3

    def passes(self, ranks: int) -> int:
        return min(max(self.by_square * ranks**2, self.least), self.most)

    def passes_without_gain(self, ranks: int) -> int:
        """Return the number of passes packed without a gain after which a search ends."""
        return max(self.passes(ranks) // self.share, self.patience)

    @property
    def halved(self) -> Effort:
        """This effort with half the passes, for a long step.

        The middle of such a step comes from another search or from a known pattern.
        """
        by_square, least, most = self.by_square // 2, self.least // 2, self.most // 2
        return replace(self, by_square=by_square, least=least, most=most, share=5)

    @property
    def brief(self) -> Effort:
        """A small effort, about a second, for a search between two training steps."""
        passes = self.patience // 8
        return replace(self, by_square=0, least=passes, most=passes, patience=0)


def small_effort(packer: Callable[[JobShop], Pack] = pack.packer) -> Effort:
    """Return the effort of a search in plain Python, without numba: seconds to minutes."""
    return Effort(SMALL, packer, 33_000, 1_500_000, 10_000_000, 2_500_000, 2_000)


def effort() -> Effort:
    """Return the largest effort of a search that this machine allows: large with numba."""
    try:
        from megatron_ext.search import compiled
    except Exception as error:  # a numba that does not match its numpy may raise anything
        remark(
            f"the search runs with small effort, without numba ({error}): with "
            f"pip install 'megatron_ext[search]' it finds better schedules in less time"
        )
        return small_effort()
    return Effort(
        LARGE, compiled.compiled_packer, 400_000, 6_000_000, 300_000_000, 30_000_000, 16_000
    )
