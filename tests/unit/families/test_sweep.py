"""Tests of every schedule family at many sizes, costs and memory limits.

A family gives a program that `prove` accepts, and that is complete, in microbatch order and within
its limit (these three are checked here once more, from the rows alone). Otherwise the family says
clearly why not. A refusal of a too small limit names the least feasible one, within which the
family succeeds. At night the tests run these cases, with p ranks and m microbatches:

- Most families have p = 2 to 16, 24 and 32. For p up to 8 m is 1 to 4p, for p up to 16 it is 1, p,
  p+1 and 2p-1, and for larger p it is 1, p and p+1. zb-auto, zb-1p and zb-2p, which search, have
  p = 2, 3, 4, 6, 8, 12 and 16, and m = 1, p, p+1, 2p-1 and 3p+1. v-auto, wave-auto and loop-auto,
  which search for longer, have p = 2, 3 and 4, and m = 1, p and 2p+1.
- Loops have 2 and 3 chunks a rank, and there are 1 and 2 waves.
- Costs F : I : W are equal, 10:12:8 with 1 for a message, 18:18:9, or 10:20:10. A family that does
  not use costs runs with equal ones only. A family that uses costs runs with all four at p <= 4. At
  larger p, and if the family searches, each case has the next of the four.
- Memory limits, at m = p, are a tenth of a microbatch, half of the peak without a limit, and the
  whole peak. They are in microbatches for even p, and in bytes for odd p, with stages that store
  unequal amounts. At p <= 8 and m = p+1 the units are exchanged.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.verify import InvalidSchedule
from megatron_ext.compile.registry import FamilyEntry, choose, entries, with_option
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs, uniform
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit, parse_limit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem
from tests.helpers.combinations import at_night

RANKS = (*range(2, 17), 24, 32)
COSTS = {
    "equal": (1, 1, 1, 0),
    "10:12:8, hop 1": (10, 12, 8, 1),
    "18:18:9": (18, 18, 9, 0),
    "10:20:10": (10, 20, 10, 0),
}
SEARCHES = ("zb-auto", "zb-1p", "zb-2p")
SEARCHES_LONG = ("v-auto", "wave-auto", "loop-auto")
BYTES = 2**30  # approximate bytes of a microbatch on a rank


@dataclass(frozen=True)
class Case:
    """One size with one set of costs. ``limited`` is the unit of the memory limits to try, or
    None."""

    spec: str
    ranks: int
    microbatches: int
    costs: str
    limited: str | None

    def __str__(self) -> str:
        return f"{self.spec}, p={self.ranks}, m={self.microbatches}, costs {self.costs}"


class Problematic(Exception):
    """Raised for a case in which a family breaks its promises."""


# ---- the grid of sizes


def microbatch_counts(family: str, ranks: int) -> list[int]:
    p = ranks
    if p <= 8 and family not in SEARCHES + SEARCHES_LONG:
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


def cases(entry: FamilyEntry, p: int) -> Iterator[Case]:
    """Yield the cases of ``entry`` on ``p`` ranks."""
    searches = entry.name in SEARCHES + SEARCHES_LONG
    for spec in specs(entry):
        units = ("microbatches", "bytes") if p % 2 == 0 else ("bytes", "microbatches")
        limits = {p: units[0]} | ({p + 1: units[1]} if p <= 8 else {})
        for number, m in enumerate(microbatch_counts(entry.name, p)):
            names = list(COSTS)
            if not entry.traits.uses_costs:
                names = names[:1]
            elif searches or p > 4:
                names = [names[(number + p) % len(names)]]
            for costs in names:
                yield Case(spec, p, m, costs, limits.get(m))


def costs_of(case: Case, placement: Placement) -> Costs:
    """Return costs whose bytes differ between stages: the first and last store more, and the inputs
    of W are smaller or larger than activations."""
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


# ---- properties of a program, counted from its rows


def check_rows(rows: Sequence[Sequence[Action]], problem: Problem) -> None:
    """Raise Problematic unless each pass is on its rank, each kind is complete and in microbatch
    order, and F comes before I before W."""
    placement, m = problem.placement, problem.microbatches
    order: dict[tuple[int, str], list[int]] = {}
    for rank, row in enumerate(rows):
        for stage, kind, k in row:
            if placement.rank_of[stage] != rank:
                raise Problematic(f"stage {stage} has a pass on rank {rank}, which is not its rank")
            for duty in "IW" if kind is Kind.FULL_BACKWARD else kind:
                order.setdefault((stage, duty), []).append(k)
                earlier = {"F": None, "I": "F", "W": "I"}[duty]
                if earlier and k not in order.get((stage, earlier), [])[k : k + 1]:
                    raise Problematic(f"{stage}{duty}{k} comes before {stage}{earlier}{k}")
    for stage in range(placement.stages):
        for duty in "FIW":
            if order.get((stage, duty)) != list(range(m)):
                raise Problematic(
                    f"the microbatches of {duty} on stage {stage} are {order.get((stage, duty))}"
                )


def peak(rows: Sequence[Sequence[Action]], problem: Problem, unit: str) -> float:
    """Return the largest amount that a rank stores: in bytes if ``unit`` is "bytes", else in
    microbatches."""
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


# ---- running the cases


def attempt(case: Case, limit: MemoryLimit | None) -> tuple[float, str]:
    """Return the memory peak of a proved program and "", or 0 and the reason why the case is
    refused. Raises Problematic."""
    resolved = choose(case.spec)
    placement = resolved.place(case.ranks)
    problem = Problem(placement, case.microbatches, costs_of(case, placement), limit)
    try:
        rows = build_program(resolved, problem).schedule.compute_rows
    except ValueError as error:
        refusal = str(error)
        names_limit = limit is not None and "least feasible limit" in refusal
        if isinstance(error, InvalidSchedule) and not names_limit:
            raise Problematic(refusal) from error
        if not names_limit and "write" not in refusal:
            raise Problematic(f"unclear refusal: {refusal}") from error
        return 0.0, refusal
    check_rows(rows, problem)
    unit = "bytes" if limit is not None and limit.bytes is not None else "microbatches"
    held = peak(rows, problem, case.limited or unit)
    if limit is not None:
        allowed = limit.bytes if limit.bytes is not None else limit.microbatches
        assert allowed is not None
        if peak(rows, problem, unit) > allowed * (1 + 1e-9):
            raise Problematic(f"the peak {peak(rows, problem, unit)} exceeds the limit {allowed}")
    return held, ""


def named_limit(refusal: str, case: Case) -> MemoryLimit:
    match = re.search(r"least feasible limit(?: for it)? is ([\w.]+)( bytes)?", refusal)
    if match is None:
        raise Problematic(f"the refusal names no feasible memory limit: {refusal}")
    if match[2]:
        return MemoryLimit(bytes=int(float(match[1])) + 1)
    return parse_limit(match[1], case.ranks, case.microbatches)


def run(case: Case) -> int:
    """Build ``case`` without and with each memory limit, and return how many programs were proved.
    Raises Problematic."""
    most, refusal = attempt(case, None)
    if refusal or case.limited is None:
        return int(not refusal)
    in_bytes, proved = case.limited == "bytes", 1
    tried: set[MemoryLimit] = set()
    # Bytes are whole, so the measured peak is rounded up.
    for amount in (0.1 * (BYTES if in_bytes else 1), most / 2, most * (1 + 1e-12)):
        limit = MemoryLimit(bytes=int(amount) + 1) if in_bytes else MemoryLimit(amount)
        _, refusal = attempt(case, limit)
        proved += not refusal
        if not refusal:
            continue
        limit = named_limit(refusal, case)
        if limit not in tried:
            tried.add(limit)
            _, again = attempt(case, limit)
            proved += not again
            if again:
                raise Problematic(f"the limit that the refusal names is refused, too: {again}")
    return proved


@pytest.fixture(autouse=True)
def no_stored_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("zb-h1", 2),
        *at_night(*((name, p) for name in entries() for p in rank_counts(name))),
    ],
)
def test_a_family_proves_a_program_or_says_why_not(family: str, ranks: int) -> None:
    proved, problems = 0, []
    for case in cases(entries()[family], ranks):
        try:
            proved += run(case)
        except Problematic as problem:
            problems.append(f"{case}: {problem}")
    assert not problems
    assert proved


def test_what_a_program_must_not_be_is_found() -> None:
    """Each check of the sweep fails for a wrong program: with a pass on a wrong rank, out of order,
    and missing."""
    problem = Problem(choose("1f1b").place(2), 2, uniform(choose("1f1b").place(2), 1, 1, 1, 0))
    rows = build_program(choose("1f1b"), problem).schedule.compute_rows
    check_rows(rows, problem)
    for wrong, said in (
        (rows[::-1], "which is not its rank"),
        ([rows[0][::-1], rows[1]], "comes before"),
        ([rows[0][:-1], rows[1]], "the microbatches of I on stage 0 are"),
    ):
        with pytest.raises(Problematic, match=said):
            check_rows(wrong, problem)
