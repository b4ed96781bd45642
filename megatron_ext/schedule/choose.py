"""All families side by side on one problem, and which to take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.registry import choose, entries
from megatron_ext.schedule.report import report
from megatron_ext.schedule.schedule import Problem


@dataclass(frozen=True)
class Plan:
    """``reports`` by makespan, shortest first; ``refused``: why others are not among them."""

    reports: tuple[dict[str, Any], ...]
    refused: dict[str, str]

    @property
    def choice(self) -> str | None:
        """The shortest step within the limit; of equals, the one that holds least."""
        return self.reports[0]["schedule"] if self.reports else None

    @property
    def pareto(self) -> tuple[str, ...]:
        """Those that no other beats in both time and memory, shortest first."""
        front: list[str] = []
        least = float("inf")
        for row in self.reports:
            if peak(row) < least:
                least = peak(row)
                front.append(row["schedule"])
        return tuple(front)


def peak(row: dict[str, Any]) -> float:
    """The largest peak of a report, in microbatches of a full rank."""
    return max(row["peak_activation_microbatches"])


def make_plan(
    ranks: int,
    microbatches: int,
    costs: Callable[[Placement], Costs],
    limit: MemoryLimit | None,
    progress: Callable[[Sequence[str]], Iterable[str]] = lambda names: names,
) -> Plan:
    """Build and simulate every family that these sizes and this limit allow.

    Args:
        costs: the costs on a placement, so that each has its own number of stages.
        progress: wraps the names, to show which is being made.
    """
    reports, refused = [], {}
    for name in progress(list(entries())):
        choice = choose(name)
        try:
            placement = choice.place(ranks)
            problem = Problem(placement, microbatches, costs(placement), limit)
            reports.append(report(choice, problem)[1])
        except ValueError as error:
            refused[name] = str(error)
    reports.sort(key=lambda row: (row["makespan"], peak(row)))
    return Plan(tuple(reports), refused)
