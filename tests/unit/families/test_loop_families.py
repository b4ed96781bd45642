"""Tests of the families with a loop placement: drawn tables, Megatron's own order, published
numbers, every size.

In the tables a column is a unit of time, ``.`` is idle, ``=`` goes on; F, I and W of a chunk cost
1, B 2.
"""

import math
from dataclasses import replace

import pytest

from megatron_ext.base.progress import reporting
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import bitwise_order
from megatron_ext.schedule.timeline import Timeline
from tests.helpers.schedules import F, drawn, table

TABLES = {
    ("interleaved", 2, 4): """
        0 0F0 0F1 2F0 2F1 0F2 . 2B0 = 0F3 2B1 = 2F2 0B0 = 2F3 0B1 = . 2B2 = . 2B3 = 0B2 = 0B3 =
        1 . 1F0 1F1 3F0 3B0 = 3F1 3B1 = 1F2 1B0 = 1F3 1B1 = 3F2 3B2 = 3F3 3B3 = 1B2 = 1B3 = . .
        """,
    ("interleaved", 2, 3): """
        0 0F0 0F1 2F0 2F1 0F2 . 2B0 = . . 2F2 2B1 = 0B0 = 0B1 = 2B2 = . . 0B2 =
        1 . 1F0 1F1 3F0 3B0 = 3F1 3B1 = 1F2 1B0 = 3F2 1B1 = 3B2 = . . 1B2 = . .
        """,
    ("breadth-first", 2, 2): """
        0 0F0 0F1 2F0 2F1 . . . 2B0 = 2B1 = 0B0 = 0B1 =
        1 . 1F0 1F1 3F0 3F1 3B0 = 3B1 = 1B0 = 1B1 = . .
        """,
    ("gis-h", 3, 3): """
        0 0F0 0F1 . 3F0 3F1 0F2 . . 3I0 3W0 3F2 3I1 3W1 0I0 0W0 0I1 3I2 0W1 3W2 0I2 0W2
        1 . 1F0 1F1 . 4F0 4F1 . 4I0 1F2 4I1 4W0 4F2 1I0 4W1 1I1 4I2 1W0 1W1 1I2 4W2 1W2
        2 . . 2F0 2F1 . 5F0 5I0 5F1 5I1 2F2 2I0 5W0 5F2 2I1 5I2 5W1 2W0 2I2 2W1 5W2 2W2
        """,
    ("units:u=2", 2, 3): """
        0 0F0 0F1 2F0 2F1 . . 2I0 2I1 0I0 0I1 0F2 2W0 2F2 2W1 0W0 2I2 0W1 0I2 2W2 0W2
        1 . 1F0 1F1 3F0 3F1 3I0 3I1 1I0 1I1 3W0 3W1 1F2 1W0 3F2 3I2 1W1 1I2 3W2 1W2 .
        """,
}  # fmt: skip


def problem_for(
    spec: str, p: int, m: int, f: float = 2, i: float = 2, w: float = 2, comm: float = 0
) -> Problem:
    placement = choose(spec).place(p)
    return Problem(placement, m, uniform(placement, f, i, w, comm))


def ran(spec: str, problem: Problem) -> Timeline:
    return simulate(build_program(choose(spec), problem), problem.costs)


@pytest.mark.parametrize(("spec", "p", "m"), TABLES)
def test_table(spec: str, p: int, m: int) -> None:
    assert drawn(ran(spec, problem_for(spec, p, m))) == table(TABLES[spec, p, m])


@pytest.mark.parametrize(
    ("spec", "p", "m", "costs", "makespan", "peak"),
    [
        ("interleaved", 8, 32, (1, 1, 1, 0), 106.5, 11.5),
        ("interleaved", 8, 32, (10, 12, 8, 1), 1095, 11.5),
        ("interleaved-zb", 8, 32, (1, 1, 1, 0), 99.5, 11.5),
        ("gis", 8, 32, (1, 1, 1, 0), 103, 8),
        ("gis-h", 8, 32, (1, 1, 1, 0), 105, 6),
        ("gis:group=4", 8, 32, (1, 1, 1, 0), 105, 6),
        ("gis", 8, 32, (10, 12, 8, 1), 1059, 8),
        ("gis-h", 8, 32, (10, 12, 8, 1), 1095, 6),
        ("gis", 4, 8, (1, 1, 1, 0), 27, 4),
        ("gis-h", 4, 8, (1, 1, 1, 0), 28, 3),
    ],
)
def test_no_worse_than_published(spec, p, m, costs, makespan, peak) -> None:
    timeline = ran(spec, problem_for(spec, p, m, *costs))
    assert timeline.makespan <= makespan
    assert max(peaks(timeline.schedule, in_microbatches(timeline.schedule))) == peak


# Megatron refuses a last group with fewer microbatches than ranks.
@pytest.mark.parametrize(
    ("spec", "m"),
    [
        *(("interleaved", m) for m in (8, 24)),
        *(("interleaved:group=10", m) for m in (8, 18)),
        *(("interleaved:vpp=3", m) for m in (8, 24)),
    ],
)
def test_order_is_megatrons(spec: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    p, group = 8, 10 if "group" in spec else 8
    problem = problem_for(spec, p, m)
    chunks = problem.placement.chunks
    size = min(group, m)
    order = schedules.get_schedule_table(m, chunks, size)
    state = schedules.parallel_state
    monkeypatch.setattr(state, "get_pipeline_model_parallel_world_size", lambda: p)
    monkeypatch.setattr(state, "get_virtual_pipeline_model_parallel_world_size", lambda: chunks)
    for rank, row in enumerate(choose(spec).build(problem).rows):
        monkeypatch.setattr(state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
        total, _, warmup, _ = schedules.get_pp_rank_microbatches(m, chunks, size)
        steps = [("F", n) for n in range(warmup)]
        for n in range(total - warmup):
            steps += [("F", warmup + n), ("B", n)]
        steps += [("B", n) for n in range(total - warmup, total)]
        expected = []
        for kind, n in steps:
            k, chunk = order[n]
            chunk = chunk if kind == "F" else chunks - 1 - chunk
            expected.append((chunk * p + rank, kind, k))
        assert [(s, str(kind), k) for s, kind, k in row] == expected


@pytest.mark.parametrize(
    "spec",
    [
        "interleaved",
        "interleaved:vpp=3",
        "interleaved-zb",
        "breadth-first",
        "gis",
        "gis:vpp=3",
        "gis-h",
        "gis-h:vpp=4",
    ],
)
@pytest.mark.parametrize("p", [2, 3, 5, 6])
def test_every_size_is_sound_or_refused(spec: str, p: int) -> None:
    for m in sorted({1, 2, p - 1, p, p + 1, 2 * p, 2 * p + 2}):
        problem = problem_for(spec, p, m, 10, 12, 8, 1)
        try:
            schedule = build_program(choose(spec), problem).schedule
        except ValueError as refusal:
            assert "would deadlock; write" in str(refusal)
            assert m % p
        else:
            assert bitwise_order(schedule)


@pytest.mark.parametrize("p", [3, 8])
@pytest.mark.parametrize("g", ["low", "high"])
def test_peak_of_gis(p: int, g: str) -> None:
    group = -(-p // 2) if g == "low" else p
    for vpp in (2, 3):
        schedule = choose(f"gis:group={group},vpp={vpp}").build(
            problem_for(f"gis:vpp={vpp}", p, 4 * group)
        )
        peak = max(peaks(schedule, in_microbatches(schedule)))
        assert peak == pytest.approx((group * (vpp - 1) + p) / vpp)


@pytest.mark.parametrize(
    ("spec", "fact"),
    [
        ("gis:group=3", "group is 3, and with 8 pipeline ranks a group has 4 to 8"),
        ("gis:group=9", "group is 9, and with 8 pipeline ranks a group has 4 to 8"),
        ("interleaved:group=4", "group is 4, fewer microbatches than the 8 pipeline ranks"),
    ],
)
def test_impossible_groups_are_refused(spec: str, fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        choose(spec).build(problem_for(spec, 8, 32))


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("ScheduleInterleaved1F1B", "interleaved"),
        ("LoopedBFS", "breadth-first"),
        ("InterleavedZeroBubble", "interleaved-zb"),
    ],
)
def test_torchs_names(alias: str, name: str) -> None:
    assert choose(alias).build(problem_for(alias, 2, 2)).name == name


def test_evaluation_of_an_incomplete_group_keeps_its_forwards() -> None:
    problem = problem_for("interleaved", 2, 3)
    row = choose("interleaved").build(problem).rows[0]
    assert [a.microbatch for a in row if a.kind is F] == [0, 1, 0, 1, 2, 2]


@pytest.mark.parametrize("vpp", [2, 3])
def test_one_unit_of_whole_backwards_is_breadth_first(vpp: int) -> None:
    spec = f"units:u=12,vpp={vpp}"
    problem = problem_for(spec, 4, 12)
    whole = choose(f"breadth-first:vpp={vpp}").build(problem)
    for row, other in zip(choose(spec).build(problem).rows, whole.rows, strict=True):
        passes = [action for action in row if action.kind is not Kind.BACKWARD_WEIGHT]
        assert [(a.stage, a.kind is F, a.microbatch) for a in passes] == [
            (a.stage, a.kind is F, a.microbatch) for a in other
        ]


def test_a_limit_chooses_the_unit() -> None:
    """The family "units" chooses the number of microbatches in a unit by the memory limit. More
    memory never makes the step longer, and all memory is used if that is fastest."""
    before = math.inf
    for limit in (1, 2, 4, 6, 8, 12, 16):
        problem = replace(problem_for("units", 4, 16), memory_limit=MemoryLimit(microbatches=limit))
        timeline = ran("units", problem)
        assert max(peaks(timeline.schedule, in_microbatches(timeline.schedule))) <= limit
        assert timeline.makespan <= before
        before = timeline.makespan
    assert before == ran("units:u=16", problem_for("units", 4, 16)).makespan


@pytest.mark.parametrize("name", ["modular-pipeline", "layered-accumulation"])
def test_names_of_breadth_first(name: str) -> None:
    resolved, remarks = choose(f"{name}:vpp=3"), list[str]()
    problem = problem_for("breadth-first:vpp=3", 2, 3)
    with reporting(remarks.append, remarks.append):
        assert resolved.build(problem) == choose("breadth-first:vpp=3").build(problem)
    assert remarks == [f"{name} is breadth-first here"]
