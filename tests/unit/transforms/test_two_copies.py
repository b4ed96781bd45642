"""Tests of schedules of two model copies that are folded onto one: the same passes at the same
times on the same ranks."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from megatron_ext.base.progress import reporting
from megatron_ext.compile.build import build_program, complete
from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose, entries
from megatron_ext.compile.two_copies.fold import fold, unfold, unfolded
from megatron_ext.compile.two_copies.two_copies import (
    TwoCopies,
    copies_to_csv,
    from_rows,
    holds_two_copies,
)
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.costs import Costs, uniform
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from tests.helpers import two_copies
from tests.helpers.schedules import drawn, rows_of, table

BY_V = ("zb-v", "v-half", "1f1b-v", "dualpipe-v", "chimera", "hanayo:waves=1", "hanayo", "bitpipe")


def costs_of(placement: Placement, hop: float) -> Costs:
    """Return costs in which F, I and W of a stage take 1, as in `two_copies.makespan`."""
    f = placement.chunks
    return uniform(placement, f, f, f, hop)


def scheduled(spec: str, p: int, m: int) -> Schedule:
    placement = choose(spec).place(p)
    return choose(spec).build(Problem(placement, m, costs_of(placement, 0)))


def seconds(schedule: Schedule, hop: float) -> float:
    m = 1 + max(action.microbatch for action in schedule.rows[0])
    problem = Problem(schedule.placement, m, costs_of(schedule.placement, hop))
    return simulate(complete(schedule, problem), problem.costs).makespan


# --- the papers' numbers, with their own p and m; the tests use half of each


@pytest.mark.parametrize(
    ("name", "p", "m", "makespan", "peaks_of_stages"),
    [
        ("chimera", 4, 4, 16, (4, 3)),
        # the bubble is (p-2) / (3m/2 + p-2) of the step if m = p
        ("chimera", 8, 8, 36, (8, 7, 6, 5)),
        ("chimera", 8, 16, 66, (8, 7, 6, 5)),
        # Peaks count chunks of half a stage. Counted in whole stages the makespan is 30, and the
        # peaks are 6.5 to 8.
        ("bitpipe", 8, 8, 60, (16, 15, 14, 13)),
        ("bitpipe", 8, 16, 114, (16, 15, 14, 13)),
        ("bitpipe", 8, 32, 222, (16, 15, 14, 13)),
    ],
)
def test_published_figures(
    name: str, p: int, m: int, makespan: int, peaks_of_stages: tuple[int, ...]
) -> None:
    """Schedules of two model copies have their published numbers. The papers count B as twice the
    time of F."""
    schedule = scheduled(name, p // 2, m // 2)
    assert seconds(schedule, 0) == makespan
    chunks = schedule.placement.chunks
    assert peaks(schedule, in_microbatches(schedule)) == [
        pytest.approx(peak / chunks) for peak in peaks_of_stages
    ]


def test_bitpipes_bubble_where_passes_take_as_long() -> None:
    """BitPipe's published bubble holds if passes take equal time: a share (p-2) / (4m + p-2) of the
    step. Here p = m = 8, and the step, folded onto 4 ranks, takes 19 time units."""
    placement = choose("bitpipe").place(4)
    problem = Problem(placement, 4, uniform(placement, 2, 1, 1))
    timeline = simulate(build_program(choose("bitpipe"), problem), problem.costs)
    assert timeline.makespan == 19
    assert timeline.bubble_share_makespan == pytest.approx(6 / (4 * 8 + 6))


@pytest.mark.parametrize("name", ["chimera", "bitpipe"])
@pytest.mark.parametrize("p", [3, 4])
@pytest.mark.parametrize("units", [1, 3])
def test_bubble_by_units(name: str, p: int, units: int) -> None:
    placement = choose(name).place(p)
    for f, i, w in ((60, 60, 60), (60, 72, 48), (40, 20, 20)):
        problem = Problem(placement, units * p, uniform(placement, f, i, w))
        timeline = simulate(build_program(choose(name), problem), problem.costs)
        b, waves = i + w, placement.chunks // 2
        bubble = (p - 1) * (b + (units - 1) * (b - f)) / waves
        assert timeline.makespan - timeline.work == pytest.approx(bubble)


# --- DualPipe


@pytest.mark.parametrize(("m", "makespan"), [(16, 51), (20, 63), (32, 99)])
def test_dualpipe_folds_to_dualpipe_v(m: int, makespan: int) -> None:
    copies = two_copies.dualpipe(8, m)
    folded, half = fold(copies), scheduled("dualpipe-v", 4, m // 2)
    assert (folded.rows, folded.placement.rank_of) == (half.rows, half.placement.rank_of)
    assert two_copies.makespan(copies, 0) == seconds(half, 0) == makespan
    assert seconds(half, 0.1) == pytest.approx(makespan + 1.2)
    assert two_copies.makespan(copies, 0.1) == pytest.approx(makespan + 1.7)


# --- fold and unfold


@pytest.mark.parametrize("spec", BY_V)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 3), (4, 5)])
def test_unfolded_and_folded_again(spec: str, p: int, m: int) -> None:
    schedule = scheduled(spec, p, m)
    copies = unfold(schedule)
    assert copies.ranks == 2 * p
    assert holds_two_copies(copies.rows)
    again = fold(copies)
    assert (again.rows, again.placement.rank_of) == (schedule.rows, schedule.placement.rank_of)


def test_symmetric_schedules_take_as_long_folded() -> None:
    random = Random(0)
    for _ in range(100):
        copies = two_copies.random_two_copies(random)
        folded = fold(copies)
        assert unfold(folded).rows == copies.rows
        assert seconds(folded, 0) == pytest.approx(two_copies.makespan(copies, 0))
        hop = random.choice((0.1, 1.0, 3.0))
        of_one = two_copies.makespan_of_one(folded, hop)
        assert of_one <= two_copies.makespan(copies, hop) + 1e-9


def test_what_is_not_symmetric_is_named() -> None:
    copies = two_copies.dualpipe(4, 8)
    third = list(copies.rows[3])
    assert list(map(str, third[2:4])) == ["0F2", "3F0"]
    third[2], third[3] = third[3], third[2]
    with pytest.raises(
        ValueError, match=r"pass 3 of rank 0 is 0F2 of copy 0, but .* rank 3 is 3F0 of copy 0"
    ):
        fold(TwoCopies("mine", copies.rank_of, (*copies.rows[:3], tuple(third))))
    with pytest.raises(ValueError, match=r"pass 18 of rank 1 is \w+ of copy \d, but .* none;"):
        fold(
            TwoCopies(
                "mine", copies.rank_of, (*copies.rows[:2], copies.rows[2][:-1], copies.rows[3])
            )
        )


def test_both_copies_are_drawn_at_the_times_of_the_fold() -> None:
    folded = scheduled("chimera", 1, 1)
    problem = Problem(folded.placement, 1, costs_of(folded.placement, 0))
    both = unfolded(simulate(complete(folded, problem), problem.costs))
    # Stages 2 and 3 belong to copy 1.
    assert drawn(both) == table("0 0F0 3F0 3B0 = 0B0 =\n1 2F0 1F0 1B0 = 2B0 =")


# --- files


@pytest.mark.parametrize("counted", ["on", "anew"])
def test_a_file_of_two_copies_is_folded(tmp_path: Path, counted: str) -> None:
    copies = two_copies.dualpipe(4, 8)
    path = tmp_path / "dualpipe.csv"
    rows = [",".join(map(str, row)) + "\n" for row in copies.rows]
    path.write_text(copies_to_csv(copies) if counted == "on" else "".join(rows))
    resolved, remarks = choose(str(path)), list[str]()
    half = scheduled("dualpipe-v", 2, 4)
    problem = Problem(half.placement, 4, costs_of(half.placement, 0))
    with reporting(remarks.append, remarks.append):
        assert resolved.build(problem).rows == half.rows
    assert resolved.place(2).rank_of == half.placement.rank_of
    assert remarks == [
        f"schedule file {path} holds every stage twice: on the same GPUs that is 2 pipeline ranks "
        f"with data parallelism doubled, and half of its microbatches each; so it is folded"
    ]


@pytest.mark.parametrize("spec", BY_V)
def test_the_copy_of_each_pass_is_recovered(spec: str) -> None:
    copies = unfold(scheduled(spec, 3, 4))
    again = from_rows(copies.rows, copies.name)
    assert (again.rows, again.rank_of) == (copies.rows, copies.rank_of)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "0F0 1F1 1B1 0B0 0F2 0B2\n1F0 1B0 0F1 0B1 1F2 1B2",
            r"2 microbatches to one copy and 1 .*; give both",
        ),
        ("0F0 2F1\n1F0 1F1\n2F0 0F1", r"two copies of every stage on 3 ranks"),
    ],
)
def test_what_cannot_be_two_replicas(text: str, expected: str) -> None:
    rows: tuple[tuple[Action, ...], ...] = rows_of(text)
    assert holds_two_copies(rows)
    with pytest.raises(ValueError, match=expected):
        from_rows(rows, "mine")


def test_ordinary_tables_hold_one_copy() -> None:
    for name, entry in entries().items():
        if not entry.traits.searches:
            assert not holds_two_copies(scheduled(name, 4, 8).rows)


def test_the_name_of_two_copies_says_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"halve --pipeline-model-parallel-size and .* dualpipe-v"):
        choose("dualpipe")
