"""Speeds of pipeline ranks that differ: one GPU that is slow, or GPUs of several types.

A speed is relative to the ranks that the costs were measured or estimated for: a rank of speed 0.77
takes 1 / 0.77 = 1.3 times as long for each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.base.words import counted, shown
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.placement import Placement

LEAST, MOST = 0.01, 100.0
_EXAMPLE = "write one speed per pipeline rank, such as 1,1,0.77,1"


@dataclass(frozen=True)
class RankSpeeds:
    """The relative speed of each pipeline rank, as written by a user; 1 is the speed that the costs
    are for."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        return ",".join(f"{speed:.4g}" for speed in self.values)

    def of_ranks(self, ranks: int, flag: str = "--rank-speeds") -> tuple[float, ...]:
        """Return the speeds, after a check that there is one for each of ``ranks`` pipeline ranks.

        Raises:
            ValueError: there are more or fewer speeds than pipeline ranks.
        """
        if len(self.values) != ranks:
            raise ValueError(
                f"{flag} {self}: {counted(len(self.values), 'speed')} for "
                f"{counted(ranks, 'pipeline rank')}; {_EXAMPLE}"
            )
        return self.values


def parse_rank_speeds(text: str, flag: str = "--rank-speeds") -> RankSpeeds:
    """Return the speeds of pipeline ranks in ``text``, a value of ``flag`` such as ``1,0.77``.

    Raises:
        ValueError: one of them is no number from `LEAST` to `MOST`.
    """
    try:
        speeds = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} {shown(text)}: not all are numbers; {_EXAMPLE}") from None
    if not all(LEAST <= speed <= MOST for speed in speeds):
        raise ValueError(
            f"{flag} {shown(text)}: a speed must be a number from {LEAST:g} to {MOST:g}; a rank "
            "with the costs as given has speed 1"
        )
    return RankSpeeds(speeds)


def at_speeds(costs: Costs, placement: Placement, speeds: Sequence[float]) -> Costs:
    """Return a copy of ``costs`` for pipeline ranks with these relative ``speeds``.

    ``placement`` says which rank holds each stage. Passes take 1 / speed times as long; messages,
    copies and bytes stay as they are. ``speeds`` is empty if all ranks are alike.
    """
    if all(speed == 1 for speed in speeds):
        return costs
    assert not costs.slowness and costs.unpartitioned is None
    return costs.slowed(slowness_of(placement, speeds))


def slowness_of(placement: Placement, speeds: Sequence[float]) -> tuple[float, ...]:
    """Return by stage how many times as long its rank takes as the rank that the costs are for.

    This is 1 / speed of the rank on which ``placement`` puts the stage.
    """
    return tuple(1 / speeds[rank] for rank in placement.rank_of)
