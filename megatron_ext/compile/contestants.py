"""Contestants of a race: schedules of one placement, compared with a baseline."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_ext.base.words import counted
from megatron_ext.compile.registry import ResolvedSpec, choose
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.stock_executor import STOCK

# The plainest schedule of each placement; the baseline is the first on the same placement.
_BASELINES = ("1f1b", "interleaved", "interleaved:vpp={chunks}", "1f1b-v", "hanayo:waves={waves}")


class RaceThen(enum.StrEnum):
    """Schedules that a training may go on under when its race is over."""

    WINNER = "winner"
    REPORT = "report"  # the baseline; the race only reports its figures


@dataclass(frozen=True)
class Contestants:
    """Schedules of a race, as the user wrote them, the baseline first."""

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
        """Words on whether the baseline's order of passes is stock's."""
        name = _family(self.baseline)
        return "stock's order" if name in STOCK else "no order of stock's, which has no such stages"

    @cached_property
    def resolved_specs(self) -> tuple[ResolvedSpec, ...]:
        return tuple(map(choose, self.specs))


def contestants(schedule: str | None, wanted: Sequence[str]) -> Contestants:
    """Return the contestants of a race: ``wanted``, and ``schedule`` if one is given.

    A schedule of the baseline's family among them is the baseline.

    Raises:
        ValueError: there is no such schedule, none to race with, one twice, or they are of several
            placements or of one on which we have no plain schedule.
    """
    specs = list(dict.fromkeys([*([schedule] if schedule is not None else []), *wanted]))
    if not wanted:
        raise ValueError(
            "--pipeline-race names no schedule: write the names of one or more schedules, as "
            '"zb-h1 zb-1p"'
        )
    for spec in wanted:
        if wanted.count(spec) > 1:
            raise ValueError(
                f"--pipeline-race {' '.join(wanted)}: {spec} is named twice; write it once"
            )
    choices = {spec: choose(spec) for spec in specs}
    ranks = next((resolved.ranks for resolved in choices.values() if resolved.ranks is not None), 2)
    placements = {spec: resolved.place(ranks) for spec, resolved in choices.items()}
    first = placements[specs[0]]
    for spec, placement in placements.items():
        if placement.rank_of != first.rank_of:
            raise ValueError(
                f"--pipeline-race: {specs[0]} has {_words(first)} and {spec} has "
                f"{_words(placement)}, and layers do not change ranks while a model trains: race "
                f"schedules of one placement"
            )
    baseline = _baseline(first, specs)
    candidates = [spec for spec in specs if spec != baseline]
    if not candidates:
        raise ValueError(
            f"--pipeline-race {baseline} has no schedule to race with: {baseline} is the baseline; "
            "name another schedule"
        )
    return Contestants((baseline, *candidates))


def _baseline(placement: Placement, specs: Sequence[str]) -> str:
    chunks = placement.chunks
    for text in _BASELINES:
        spec = text.format(chunks=chunks, waves=chunks // 2)
        if chunks % 2 and "waves" in spec:
            continue
        if choose(spec).place(placement.ranks).rank_of == placement.rank_of:
            of_family = [given for given in specs if _family(given) == _family(spec)]
            return of_family[0] if of_family else spec
    raise ValueError(
        f"--pipeline-race: {specs[0]} has stages on ranks {list(placement.rank_of)}, where we have "
        f"no plain schedule to compare with: race schedules of a line, a loop, a V or a wave"
    )


def _family(spec: str) -> str:
    return spec.partition(":")[0]


def _words(placement: Placement) -> str:
    return f"the placement {placement.name} with {counted(placement.chunks, 'stage')} on a rank"
