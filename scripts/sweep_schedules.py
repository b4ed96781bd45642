"""Put every family of schedules to the proof at many sizes, costs and memory limits.

    python scripts/sweep_schedules.py                     # everything; exit status 1 on a problem
    python scripts/sweep_schedules.py --family gis --ranks 5 --all

For each case a family either gives a program that is proved, complete, in microbatch order and
within its limit (the last three counted here once more, from the rows alone), or says clearly why
not. Where a limit is too small it names the least feasible one, and solves the problem within that.

The grid, unless --ranks or --all say otherwise:

- p is 2 to 16, 24 and 32; m is 1 to 4p up to p = 8, then 1, p, p+1 and 2p-1, and for p over 16 1, p
  and p+1. zb-auto, zb-1p and zb-2p, which search, have p 2, 3, 4, 6, 8, 12 and 16, and m 1, p, p+1,
  2p-1 and 3p+1; v-auto, wave-auto and loop-auto, which search long, have p 2, 3 and 4, and m 1, p
  and 2p+1.
- Loops have 2 and 3 chunks a rank, waves are 1 and 2.
- Costs: equal, 10:12:8 with 1 for a hop, 18:18:9, 10:20:10. A family that does not look at them
  has the first alone; one that does has all at p <= 4, else (and if it searches) one in turn.
- Limits, at m = p: a tenth of a microbatch, half the peak without a limit, and all of it; in
  microbatches where p is even, in bytes where it is odd, with stages that hold unequal amounts. At
  p <= 8 and m = p+1 the other way round.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.verify import InvalidSchedule
from megatron_ext.compile.registry import FamilyEntry, choose, entries, with_option
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs, uniform
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit, parse_limit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem

RANKS = (*range(2, 17), 24, 32)
COSTS = {
    "equal": (1, 1, 1, 0),
    "10:12:8, hop 1": (10, 12, 8, 1),
    "18:18:9": (18, 18, 9, 0),
    "10:20:10": (10, 20, 10, 0),
}
SEARCHES = ("zb-auto", "zb-1p", "zb-2p")
SEARCHES_LONG = ("v-auto", "wave-auto", "loop-auto")
BYTES = 2**30  # of a microbatch on a rank, about


@dataclass(frozen=True)
class Case:
    """One size with one set of costs; ``limited``: the unit of the limits to try, if any."""

    family: str
    spec: str
    ranks: int
    microbatches: int
    costs: str
    limited: str | None

    def __str__(self) -> str:
        return f"{self.spec}, p={self.ranks}, m={self.microbatches}, costs {self.costs}"


@dataclass
class Tally:
    """Outcome of a family's cases."""

    proved: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    worst_seconds: float = 0.0
    worst: str = ""

    def __str__(self) -> str:
        return (
            f"{len(self.problems)} problems, {self.proved} proved, {self.refused.total()} refused, "
            f"at worst {self.worst_seconds:.2f} s ({self.worst})"
        )


class Problematic(Exception):
    """A case that must not be."""


# ---- The grid


def microbatch_counts(family: str, ranks: int, everything: bool) -> list[int]:
    p = ranks
    if everything or (p <= 8 and family not in SEARCHES + SEARCHES_LONG):
        return list(range(1, 4 * p + 1))
    if family in SEARCHES_LONG:
        return [1, p, 2 * p + 1]
    if p > 16:
        return [1, p, p + 1]
    if family in SEARCHES:
        return sorted({1, p, p + 1, 2 * p - 1, 3 * p + 1})
    return sorted({1, p, p + 1, 2 * p - 1})


def rank_counts(family: str) -> Sequence[int]:
    if family in SEARCHES_LONG:
        return (2, 3, 4)
    return (2, 3, 4, 6, 8, 12, 16) if family in SEARCHES else RANKS


def specs(entry: FamilyEntry) -> list[str]:
    options = inspect.signature(entry.place).parameters
    for key, values in (("vpp", (2, 3)), ("waves", (1, 2))):
        if key in options:
            return [with_option(entry.name, key, value) for value in values]
    return [entry.name]


def cases(entry: FamilyEntry, ranks: Sequence[int], everything: bool) -> Iterator[Case]:
    searches = entry.name in SEARCHES + SEARCHES_LONG
    for spec in specs(entry):
        for p in ranks or rank_counts(entry.name):
            counts = microbatch_counts(entry.name, p, everything)
            units = ("microbatches", "bytes") if p % 2 == 0 else ("bytes", "microbatches")
            limits = {p: units[0]} | ({p + 1: units[1]} if p <= 8 else {})
            for number, m in enumerate(counts):
                names = list(COSTS)
                if not entry.traits.uses_costs:
                    names = names[:1]
                elif searches or p > 4:
                    names = [names[(number + p) % len(names)]]
                for costs in names:
                    yield Case(entry.name, spec, p, m, costs, limits.get(m))


def costs_of(case: Case, placement: Placement) -> Costs:
    """Return costs whose bytes differ between stages: more on the first and last, and the inputs of
    W smaller or larger than activations."""
    costs = uniform(placement, *COSTS[case.costs])
    share, last = BYTES / placement.chunks, placement.stages - 1
    stages = range(placement.stages)
    activation = tuple(share * (1.5 if s in (0, last) else 1 + 0.01 * s) for s in stages)
    return costs.with_passes(
        held_bytes={
            Held.ACTIVATION: activation,
            Held.WEIGHT_INPUTS: tuple(a * (0.6, 1.1)[s % 2] for s, a in enumerate(activation)),
        }
    )


# ---- What must hold, counted from the rows


def check_rows(rows: Sequence[Sequence[Action]], problem: Problem) -> None:
    """Check that rows are complete, with each pass on its rank, each kind in microbatch order, and
    F before I before W."""
    placement, m = problem.placement, problem.microbatches
    order: dict[tuple[int, str], list[int]] = {}
    for rank, row in enumerate(rows):
        for stage, kind, k in row:
            if placement.rank_of[stage] != rank:
                raise Problematic(f"stage {stage} runs on rank {rank}")
            for duty in "IW" if kind is Kind.FULL_BACKWARD else kind:
                order.setdefault((stage, duty), []).append(k)
                earlier = {"F": None, "I": "F", "W": "I"}[duty]
                if earlier and k not in order.get((stage, earlier), [])[k : k + 1]:
                    raise Problematic(f"{stage}{duty}{k} comes before {stage}{earlier}{k}")
    for stage in range(placement.stages):
        for duty in "FIW":
            if order.get((stage, duty)) != list(range(m)):
                raise Problematic(f"{duty} of stage {stage} runs for {order.get((stage, duty))}")


def peak(rows: Sequence[Sequence[Action]], problem: Problem, unit: str) -> float:
    """Return the most that a rank holds: microbatches, or bytes if ``unit`` is "bytes"."""
    share, held_bytes = 1 / problem.placement.chunks, problem.costs.held_bytes
    assert held_bytes is not None
    most = 0.0
    for row in rows:
        held = 0.0
        for stage, kind, _ in row:
            activation = rest = share
            if unit == "bytes":
                activation = held_bytes[Held.ACTIVATION][stage]
                rest = held_bytes[Held.WEIGHT_INPUTS][stage]
            held += {"F": activation, "I": rest - activation, "W": -rest, "B": -activation}[kind]
            most = max(most, held)
    return most


# ---- Running


def attempt(case: Case, limit: MemoryLimit | None, tally: Tally) -> tuple[float, str]:
    """Return the peak of a sound program, or the reason of its refusal. Raises Problematic."""
    choice = choose(case.spec)
    placement = choice.place(case.ranks)
    problem = Problem(placement, case.microbatches, costs_of(case, placement), limit)
    start = time.process_time()  # others may use the machine, too
    try:
        rows = build_program(choice, problem).schedule.compute_rows
    except ValueError as error:
        refusal = str(error)
        names_limit = limit is not None and "least feasible limit" in refusal
        if isinstance(error, InvalidSchedule) and not names_limit:
            raise Problematic(refusal) from error
        if not names_limit and "write" not in refusal:
            raise Problematic(f"unclear refusal: {refusal}") from error
        tally.refused[kind_of(refusal)] += 1
        return 0.0, refusal
    except Exception as error:
        raise Problematic(f"{type(error).__name__}: {error}") from error
    seconds = time.process_time() - start
    if seconds > tally.worst_seconds:
        tally.worst_seconds, tally.worst = seconds, f"p={case.ranks}, m={case.microbatches}"
    check_rows(rows, problem)
    unit = "bytes" if limit is not None and limit.bytes is not None else "microbatches"
    held = peak(rows, problem, case.limited or unit)
    if limit is not None:
        allowed = limit.bytes if limit.bytes is not None else limit.microbatches
        assert allowed is not None
        if peak(rows, problem, unit) > allowed * (1 + 1e-9):
            raise Problematic(f"the peak is {peak(rows, problem, unit)}")
    tally.proved += 1
    return held, ""


def kind_of(refusal: str) -> str:
    """Return a refusal without its figures."""
    if "least feasible limit" in refusal:
        return "over the memory limit; the least feasible is named"
    return re.sub(r"\d+(\.\d+)?", "#", refusal)


def named_limit(refusal: str, case: Case) -> MemoryLimit:
    match = re.search(r"least feasible limit(?: for it)? is ([\w.]+)( bytes)?", refusal)
    if match is None:
        raise Problematic(f"no limit is named: {refusal}")
    if match[2]:
        return MemoryLimit(bytes=int(float(match[1])) + 1)
    return parse_limit(match[1], case.ranks, case.microbatches)


def run(case: Case, tally: Tally) -> None:
    """Make all attempts at ``case``."""
    limit: MemoryLimit | None = None
    try:
        most, refusal = attempt(case, None, tally)
        if refusal or case.limited is None:
            return
        in_bytes = case.limited == "bytes"
        tried: set[MemoryLimit] = set()
        # The peak found is rounded up: bytes are whole.
        for amount in (0.1 * (BYTES if in_bytes else 1), most / 2, most * (1 + 1e-12)):
            limit = MemoryLimit(bytes=int(amount) + 1) if in_bytes else MemoryLimit(amount)
            _, refusal = attempt(case, limit, tally)
            if not refusal:
                continue
            limit = named_limit(refusal, case)
            if limit not in tried:
                tried.add(limit)
                _, again = attempt(case, limit, tally)
                if again:
                    raise Problematic(f"the limit that was named does not do: {again}")
    except Problematic as problem:
        tally.problems.append(f"{case}, limit {limit}: {problem}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", default=[], choices=list(entries()))
    parser.add_argument("--ranks", nargs="+", type=int, default=[], help="these p alone")
    parser.add_argument("--all", action="store_true", help="every m from 1 to 4p, for every p")
    arguments = parser.parse_args(argv)
    slow = SEARCHES + SEARCHES_LONG
    chosen = sorted(arguments.family or entries(), key=lambda name: name in slow)
    grid = {name: list(cases(entries()[name], arguments.ranks, arguments.all)) for name in chosen}
    tallies = {name: Tally() for name in grid}
    start, cpu = time.perf_counter(), time.process_time()
    # A search would find what it made before an edit.
    with tempfile.TemporaryDirectory() as cache, Progress(console=Console(stderr=True)) as progress:
        os.environ["XDG_CACHE_HOME"] = cache
        task = progress.add_task("schedules", total=sum(map(len, grid.values())))
        for name, family_cases in grid.items():
            for case in family_cases:
                progress.update(task, description=f"{name}, {case.ranks} ranks")
                run(case, tallies[name])
                progress.advance(task)
            progress.console.print(f"{name}: {tallies[name]}")  # all there is, if it is stopped
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    print(f"costs {COSTS}, {seconds:.0f} s, {cpu_seconds:.0f} CPU s")
    print_tables(grid, tallies)
    return int(any(tally.problems for tally in tallies.values()))


def print_tables(grid: dict[str, list[Case]], tallies: dict[str, Tally]) -> None:
    console = Console(width=120)
    families = Table("family", "cases", "problems", "proved", "refused", "worst CPU time", box=None)
    for name, tally in tallies.items():
        families.add_row(
            name,
            str(len(grid[name])),
            str(len(tally.problems)),
            str(tally.proved),
            str(tally.refused.total()),
            f"{tally.worst_seconds:.2f} s ({tally.worst})",
        )
    console.print(families)
    reasons = Table("family", "refused", "because", box=None)
    for name, tally in tallies.items():
        for reason, count in tally.refused.items():
            reasons.add_row(name, str(count), reason)
    console.print(reasons)
    for tally in tallies.values():
        for problem in tally.problems:
            console.print(f"problem: {problem}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
