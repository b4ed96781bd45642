"""Tests of the pages about the families against the families themselves: pictures, formulas and
tables."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import Maturity, choose, entries
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from tests.helpers.combinations import at_night
from tests.helpers.schedules import drawn, program, table

DOCS = Path(__file__).resolve().parents[3] / "docs"

# ---- the grid in a family's docstring

_GRID = re.compile(
    r"With p = (\d+), m = (\d+)((?:, \w+ = \w+)*):\n\n *::\n\n(.*?)(?:\n\n|\Z)", re.DOTALL
)
# Docstrings of these families describe their search, and have no grid of passes.
SEARCHED = {name for name, entry in entries().items() if entry.traits.searches}


@pytest.mark.parametrize("name", [name for name in entries() if name not in SEARCHED])
def test_the_grid_of_a_docstring_is_the_familys(name: str) -> None:
    grid = _GRID.search(entries()[name].build.__doc__ or "")
    assert grid is not None, f"{name} shows no schedule 'With p = .., m = ..:'"
    p, m, options = int(grid[1]), int(grid[2]), grid[3].removeprefix(",").replace(" ", "")
    spec = f"{name}:{options}" if options else name
    placement = choose(spec).place(p)
    chunks = placement.chunks  # with these costs each pass of a chunk takes one unit of time
    problem = Problem(placement, m, uniform(placement, chunks, chunks, chunks))
    assert drawn(simulate(program(spec, problem), problem.costs)) == table(grid[4])


# ---- the formulas of docs/schedules.md, with costs as (F, I, W)

Formula = Callable[[int, int, int, int, int], float]

AT_ANY_COSTS: dict[str, Formula] = {
    "gpipe": lambda p, v, f, i, w: (p - 1) * (f + i + w),
    "1f1b": lambda p, v, f, i, w: (p - 1) * (f + i + w),
    "2bp": lambda p, v, f, i, w: (p - 1) * (f + i),
    "zb-h1": lambda p, v, f, i, w: (p - 1) * (f + i - w),
    "zb-h2": lambda p, v, f, i, w: (p - 1) * max(f, f + i - 2 * w),
    "interleaved": lambda p, v, f, i, w: (p - 1) * (f + i + w) / v,
    "breadth-first": lambda p, v, f, i, w: (p - 1) * (f + i + w) / v,
    "gis": lambda p, v, f, i, w: (p - 1) * (f + i - w) / v,
}
AT_EQUAL_COSTS: dict[str, Formula] = {
    "interleaved-zb": lambda p, v, f, i, w: (p - 1) * f / v,
    "gis-h": lambda p, v, f, i, w: (p - 1 + p // 2 * (v - 1)) * (f + i - w) / v,
    "zb-v": lambda p, v, f, i, w: (p - 1) * f / 2,
    "v-half": lambda p, v, f, i, w: (3 * p - (4 if p % 2 else 7)) * f / 2,
    "v-min": lambda p, v, f, i, w: (4 * p - 5 - (p - 1) % 3) * f / 2,
    "dualpipe-v": lambda p, v, f, i, w: (p - 1) * f / 2,
    "hanayo:waves=1": lambda p, v, f, i, w: (p - 1) * (f + i + w) / 2,
}
PEAKS: dict[str, Callable[[int, int, int], float]] = {
    "gpipe": lambda p, m, v: m,
    "1f1b": lambda p, m, v: p,
    "2bp": lambda p, m, v: m,
    "zb-h1": lambda p, m, v: p,
    "zb-h2": lambda p, m, v: 2 * p - 1,
    "zb-1p": lambda p, m, v: p,
    "zb-2p": lambda p, m, v: 2 * p,
    "interleaved": lambda p, m, v: ((v - 1) * p + 2 * p - 1) / v,
    "interleaved-zb": lambda p, m, v: ((v - 1) * p + 2 * p - 1) / v,
    "breadth-first": lambda p, m, v: m,
    "gis": lambda p, m, v: p,
    "gis-h": lambda p, m, v: ((v - 1) * -(-p // 2) + p) / v,
    "zb-v": lambda p, m, v: p,
    "v-half": lambda p, m, v: p // 2 + 1,
    "v-min": lambda p, m, v: (p + 4) // 3,
    "1f1b-v": lambda p, m, v: 2 * p // 3 + 1,
    "dualpipe-v": lambda p, m, v: p + 1 / 2,
    "hanayo:waves=1": lambda p, m, v: (3 * p - 1) / 2,
}
EQUAL, UNEQUAL = (60, 60, 60), [(60, 72, 48), (60, 120, 60), (36, 72, 12)]


@functools.cache
def measured(spec: str, p: int, m: int, costs: tuple[int, int, int]) -> tuple[float, float, float]:
    """Return the bubble of the makespan, the bubble of the span, and the peak activations of a
    schedule."""
    placement = choose(spec).place(p)
    problem = Problem(placement, m, uniform(placement, *costs))
    timeline = simulate(program(spec, problem), problem.costs)
    peak = max(peaks(timeline.schedule, in_microbatches(timeline.schedule)))
    return timeline.makespan - timeline.work, timeline.span - timeline.work, peak


def variants(name: str) -> list[tuple[str, int]]:
    """Return the specs of the schedule ``name``, each with its number of chunks a rank. A loop
    schedule has two specs, with 2 and with 3 chunks; another schedule has one."""
    placement = choose(name).place(4)
    if placement.name == "loop":
        return [(f"{name}:vpp={v}", v) for v in (2, 3)]
    return [(name, placement.chunks)]


@pytest.mark.parametrize("name", [*AT_ANY_COSTS, *AT_EQUAL_COSTS])
@pytest.mark.parametrize("p", [3, 4, *at_night(6)])
def test_formula(name: str, p: int) -> None:
    formula = (AT_ANY_COSTS | AT_EQUAL_COSTS)[name]
    for spec, v in variants(name):
        # The numbers of microbatches are whole groups; a group of gis-h is ceil(p/2).
        few = 2 * p if name != "gis-h" else 4 * -(-p // 2)
        sizes = [(few, EQUAL), (few + p if name != "gis-h" else few, EQUAL)]
        sizes += [(few, costs) for costs in UNEQUAL if name in AT_ANY_COSTS]
        for m, costs in sizes:
            bubble = measured(spec, p, m, costs)[0]
            assert bubble == pytest.approx(formula(p, v, *costs)), (spec, m, costs)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 7, 8, 10])
def test_formula_of_1f1b_v(p: int) -> None:
    bubble, most = measured("1f1b-v", p, 2 * p, EQUAL)[0], 5 * (p - 1) * sum(EQUAL) / 6
    assert most - sum(EQUAL) / 2 <= bubble <= most
    assert p % 3 != 1 or bubble == most


@pytest.mark.parametrize("p", [3, 6])
def test_spans_without_bubbles(p: int) -> None:
    for name in ("zb-h2", "zb-2p", "zb-v"):
        assert measured(name, p, 2 * p, EQUAL)[1] == pytest.approx(0)


@pytest.mark.parametrize("name", PEAKS)
@pytest.mark.parametrize("p", [3, 4, 6])
def test_formula_of_the_peak(name: str, p: int) -> None:
    for spec, v in variants(name):
        m = 2 * p
        assert measured(spec, p, m, EQUAL)[2] == pytest.approx(PEAKS[name](p, m, v)), spec


# ---- the page docs/schedules.md


def test_every_family_has_its_place_on_the_page() -> None:
    page = (DOCS / "schedules.md").read_text()
    headings = " ".join(re.findall(r"^### (.*)$", page, re.MULTILINE))
    for name in entries():
        assert re.search(rf"(^|[ ,]){re.escape(name)}($|[ ,])", headings), name
        assert f"[`{name}`]" in page
        assert name == "1f1b" or f"images/{name}.svg" in page


def test_the_marks_on_the_page_are_the_registrys() -> None:
    page = (DOCS / "schedules.md").read_text()
    marks = dict(re.findall(r"^\| \[`(.+?)`\]\(.*?\) \| (\w+) \|", page, re.MULTILINE))
    assert marks == {name: entry.maturity for name, entry in entries().items()}


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", DOCS / "choosing-a-schedule.md"])
def test_what_a_newcomer_is_advised_to_write_is_stable(page: Path) -> None:
    rows = page.read_text().partition("| memory | write |")[2].partition("\n\n")[0]
    names = re.findall(r"`(?:--pipeline-schedule )?([\w-]+)[ `]", rows)
    assert {"v-auto", "zb-h1"} <= set(names)
    assert {entries()[name].maturity for name in names} == {Maturity.STABLE}
