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
    """Schedules that a training may run after its race is over."""

    WINNER = "winner"
    REPORT = "report"  # the baseline of a race that only reports figures


@dataclass(frozen=True)
class Contestants:
    """Schedules that compete in a race, as the user wrote them, the baseline first."""

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
        """Words that say whether the baseline's order of passes is stock's."""
        name = family_name(self.baseline)
        return "stock's order" if name in STOCK else "no order of stock's, which has no such stages"

    @cached_property
    def resolved_specs(self) -> tuple[ResolvedSpec, ...]:
        return tuple(map(choose, self.specs))


def family_name(spec: str) -> str:
    """Return the name of the family of ``spec``, without its options."""
    return spec.partition(":")[0]
