"""Microbatches cut into slices along their sequence: orders, proof, costs, memory, oracles.

In tables a column is a unit of time, ``.`` is idle, ``=`` goes on; F, I and W of a slice cost 1.
"""

from dataclasses import replace

import pytest

from megatron_ext.schedule.build.build import build_program
from megatron_ext.schedule.build.registry import choose
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Extras, Problem
from megatron_ext.schedule.program.memory import in_microbatches, peaks
from megatron_ext.schedule.program.simulate import simulate
from megatron_ext.schedule.program.verify import Program
from megatron_ext.schedule.slices import Lengths, Slices, parse_lengths
from tests.helpers.schedules import drawn, table


def problem_for(
    spec: str,
    p: int,
    m: int,
    k: int,
    costs: str = "f=1,i=1,w=1",
    lengths: str = "even",
    **more: object,
) -> Problem:
    placement = choose(spec).place(p)
    extras = Extras(slices=Slices(k, parse_lengths(lengths)))
    return Problem(placement, m, parse_costs(costs, placement), extras=extras, **more)  # type: ignore[arg-type]


def built(spec: str, p: int, m: int, k: int, *costs: str) -> Program:
    return build_program(choose(spec), problem_for(spec, p, m, k, *costs))


def figures(program: Program) -> tuple[float, float]:
    """Makespan, and peak on the first rank."""
    makespan = simulate(program, program.problem.costs).makespan
    return makespan, peaks(program.schedule, in_microbatches(program.schedule))[0]


# ---- Tables

TABLES = {
    ("1f1b", 2, 1, 2): """
        0 F0.0 F0.1 .    .    .    B0.1 =    B0.0 =
        1 .    F0.0 F0.1 B0.1 =    B0.0 =    .    .
        """,
    ("zb-h1", 2, 2, 2): """
        0 F0.0 F0.1 F1.0 .    I0.1 W0.1 F1.1 I0.0 W0.0 I1.1 W1.1 I1.0 W1.0
        1 .    F0.0 F0.1 I0.1 F1.0 I0.0 W0.1 F1.1 I1.1 W0.0 I1.0 W1.1 W1.0
        """,
    ("gpipe", 2, 2, 2): """
        0 F0.0 F0.1 F1.0 F1.1 .    .    .    B0.1 =    B0.0 =    B1.1 =    B1.0 =
        1 .    F0.0 F0.1 F1.0 F1.1 B0.1 =    B0.0 =    B1.1 =    B1.0 =    .    .
        """,
    ("interleaved", 2, 1, 2): """
        0 0F0.0 0F0.1 2F0.0 2F0.1 . . . 2B0.1 = 2B0.0 = 0B0.1 = 0B0.0 =
        1 . 1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 = 3B0.0 = 1B0.1 = 1B0.0 = . .
        """,
    ("zb-v", 2, 1, 2): """
        0 .     1F0.0 2F0.0 1F0.1 2F0.1 . . 2I0.1 2W0.1 1I0.1 2I0.0 1I0.0 1W0.1 2W0.0 1W0.0
        1 0F0.0 0F0.1 . 3F0.0 . 3F0.1 3I0.1 3W0.1 3I0.0 3W0.0 0I0.1 0W0.1 0I0.0 0W0.0 .
        """,
    ("v-half", 2, 1, 2): """
        0 .     1F0.0 2F0.0 1F0.1 2F0.1 . . 2I0.1 1I0.1 2I0.0 1I0.0 2W0.1 1W0.1 2W0.0 1W0.0
        1 0F0.0 0F0.1 . 3F0.0 . 3F0.1 3I0.1 3I0.0 3W0.1 0I0.1 3W0.0 0I0.0 0W0.1 0W0.0 .
        """,
}  # fmt: skip


@pytest.mark.parametrize(("spec", "p", "m", "k"), TABLES)
def test_table(spec: str, p: int, m: int, k: int) -> None:
    unit = k * choose(spec).place(p).chunks
    program = built(spec, p, m, k, f"f={unit},i={unit},w={unit}")
    assert drawn(simulate(program, program.problem.costs)) == table(TABLES[spec, p, m, k])


# ---- Published figures: F = 1, B = 2, equal slices, no hops; makespan and peak of rank 0

SEQ1F1B = {
    (4, 8): [(33, 4), (28.5, 2.5), (26.25, 1.75), (25.125, 1.375)],
    (8, 8): [(45, 8), (34.5, 4.5), (29.25, 2.75), (26.625, 1.875)],
    (8, 16): [(69, 8), (58.5, 4.5), (53.25, 2.75), (50.625, 1.875)],
}
ZB_H1 = {
    (4, 8): [27, 25.5, 24.75, 24.375],
    (8, 8): [31, 27.5, 25.75, 24.875],
    (8, 16): [55, 51.5, 49.75, 48.875],
}
SEQ1F1B_I = {(4, 8): (25.125, 1.75), (8, 8): (26.625, 3.25), (8, 16): (50.625, 3.25)}
SLIMPIPE = {
    (4, 8): [(25.125, 1.75), (24.5625, 1.375), (24.28125, 1.1875)],
    (8, 8): [(26.625, 2.75), (25.3125, 1.875), (24.65625, 1.4375)],
    (8, 16): [(50.625, 2.75), (49.3125, 1.875), (48.65625, 1.4375)],
}
KS = (1, 2, 4, 8)


@pytest.mark.parametrize(("p", "m"), SEQ1F1B)
def test_seq1f1b(p: int, m: int) -> None:
    assert [figures(built("1f1b", p, m, k)) for k in KS] == SEQ1F1B[p, m]


@pytest.mark.parametrize(("p", "m"), ZB_H1)
def test_zb_h1(p: int, m: int) -> None:
    made = [figures(built("zb-h1", p, m, k)) for k in KS]
    assert made == [
        (makespan, (p - 1 + k) / k) for makespan, k in zip(ZB_H1[p, m], KS, strict=True)
    ]


@pytest.mark.parametrize(("k", "expected"), [(4, (97.75, 2.75)), (8, (96.875, 1.875))])
def test_zb_h1_of_many_microbatches(k: int, expected: tuple[float, float]) -> None:
    assert figures(built("zb-h1", 8, 32, k)) == expected


@pytest.mark.parametrize(("p", "m"), SEQ1F1B_I)
def test_seq1f1b_interleaved(p: int, m: int) -> None:
    assert figures(built("interleaved", p, m, 4)) == SEQ1F1B_I[p, m]


@pytest.mark.parametrize(("p", "m"), SLIMPIPE)
def test_slimpipe(p: int, m: int) -> None:
    made = [figures(built(f"slimpipe:vpp={v}", p, m, 8)) for v in (1, 2, 4)]
    assert made == SLIMPIPE[p, m]


@pytest.mark.parametrize(
    ("attention", "even", "peak"), [(0.1, 28.69, 1.92), (0.3, 32.83, 2.02), (0.5, 36.96, 2.12)]
)
def test_balanced_lengths_make_up_for_attention(attention: float, even: float, peak: float) -> None:
    """Later slices attend to more; lengths of equal costs bring back what equal ones lose."""
    costs = f"f=1,i=1,w=1,attention={attention}"
    assert figures(built("1f1b", 8, 8, 8, costs))[0] == pytest.approx(even, abs=0.005)
    balanced = figures(built("1f1b", 8, 8, 8, costs, "balanced"))
    assert balanced == pytest.approx((26.625, peak), abs=0.005)


@pytest.mark.parametrize(
    ("attention", "first", "last"), [(0.1, 1.09, 0.92), (0.3, 1.33, 0.79), (0.5, 1.66, 0.69)]
)
def test_balanced_lengths(attention: float, first: float, last: float) -> None:
    ends = Slices(8, Lengths.BALANCED).ends(attention)
    assert (8 * ends[0], 8 * (1 - ends[-2])) == pytest.approx((first, last), abs=0.005)


def test_an_eager_warm_up_hides_hops() -> None:
    """p = 8, m = 32, k = 8, a hop takes a fifth of a slice's F."""
    costs = "f=1,i=1,w=1,comm=0.2"
    lean, eager = (figures(built(f"1f1b:eager={e}", 8, 32, 8, costs)) for e in ("no", "yes"))
    assert lean == pytest.approx((109.8, 1.875), abs=0.05)
    assert eager == pytest.approx((99.0, 2.75), abs=0.05)
    assert figures(built("1f1b", 8, 32, 8, costs)) == eager
    problem = replace(
        problem_for("1f1b", 8, 32, 8, costs), memory_limit=MemoryLimit(microbatches=2.5)
    )
    assert figures(build_program(choose("1f1b"), problem)) == lean
