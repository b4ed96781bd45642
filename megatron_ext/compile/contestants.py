"""Contestants of a race: schedules of one placement, compared with a baseline.

They are known before a training begins, because patches and memory depend on all of them. Only
schedules of one placement can race: a model's stages do not move between steps.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

from megatron_ext.compile.registry import ResolvedSpec, choose
from megatron_ext.schedule.stock_executor import STOCK


class RaceThen(enum.StrEnum):
    """Schedules that a training may run after its race, which measures several, is over."""

    WINNER = "winner"
    REPORT = "report"  # the training goes on under the baseline; the race only reports times


@dataclass(frozen=True)
class Contestants:
    """Specs of the schedules that a training compares by measuring them, the baseline first."""

    specs: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.specs)

    @property
    def baseline(self) -> str:
        return self.specs[0]

    @property
    def candidates(self) -> tuple[str, ...]:
        return self.specs[1:]

    @property
    def order_of_baseline(self) -> str:
        """Words that say whether the baseline schedule runs passes in stock Megatron's order."""
        name = family_name(self.baseline)
        return "stock's order" if name in STOCK else "no order of stock's, which has no such stages"

    @cached_property
    def resolved_specs(self) -> tuple[ResolvedSpec, ...]:
        return tuple(map(choose, self.specs))


def family_name(spec: str) -> str:
    """Return the name of the schedule family in ``spec``, without options: ``zb-v`` of
    ``zb-v:x=1``."""
    return spec.partition(":")[0]
