"""Tests of sequences that are cut into slices: orders, proof, costs, memory, and comparison with
simple computations.

In tables a column is a unit of time, ``.`` is idle, and ``=`` continues a pass; F, I and W of a
slice take 1.
"""

import json
import pickle
import re
from dataclasses import replace
from itertools import batched, product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.build import build_program, complete
from megatron_ext.compile.program.memory import (
    held_during,
    in_bytes,
    in_microbatches,
    memory_curve,
    peak_on_host,
    peaks,
)
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import InvalidSchedule, Program, check_compute
from megatron_ext.compile.registry import choose, entries
from megatron_ext.schedule.action import Action, Kind, Slice, even_ends, parse_action
from megatron_ext.schedule.costs_text import format_costs, load_costs, parse_costs, save_costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import (
    Offload,
    Problem,
    Recompute,
    ScheduleOptions,
    VocabularyParallel,
)
from megatron_ext.schedule.schedule import Schedule, bitwise_order
from megatron_ext.schedule.schedule_csv import from_csv, to_csv
from megatron_ext.schedule.slices import Lengths, Slices, lengths_of, parse_lengths
from megatron_ext.search.bounds import lower_bound
from megatron_ext.search.certify import certify
from megatron_ext.search.weight_gradient_filling import makespan
from tests.helpers.combinations import at_night
from tests.helpers.schedules import B, F, I, W, drawn, table


def problem_for(
    spec: str, p: int, m: int, k: int, costs: str = "f=1,i=1,w=1", lengths: str = "even"
) -> Problem:
    placement = choose(spec).place(p)
    options = ScheduleOptions(slices=Slices(k, parse_lengths(lengths)))
    return Problem(placement, m, parse_costs(costs, placement), options=options)


def built(spec: str, p: int, m: int, k: int, *costs: str) -> Program:
    return build_program(choose(spec), problem_for(spec, p, m, k, *costs))


def figures(program: Program) -> tuple[float, float]:
    """Return the makespan, and the peak of the first rank."""
    makespan = simulate(program, program.problem.costs).makespan
    return makespan, peaks(program.schedule, in_microbatches(program.schedule))[0]


# --- tables

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
    ("hanayo:waves=1", 2, 1, 2): """
        0 . 1F0.0 2F0.0 1F0.1 2F0.1 . . . 2B0.1 = 1B0.1 = 2B0.0 = 1B0.0 = . .
        1 0F0.0 0F0.1 . 3F0.0 . 3F0.1 3B0.1 = 3B0.0 = . . 0B0.1 = . . 0B0.0 =
        """,
    ("gis", 2, 1, 2): """
        0 0F0.0 0F0.1 2F0.0 2F0.1 . . 2I0.1 2I0.0 0I0.1 0I0.0 2W0.1 2W0.0 0W0.1 0W0.0
        1 . 1F0.0 1F0.1 3F0.0 3F0.1 3I0.1 3I0.0 1I0.1 1I0.0 3W0.1 3W0.0 1W0.1 1W0.0 .
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


# --- published numbers: F = 1, B = 2, equal slices, free messages; makespan and peak of rank 0

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
    """Slices of balanced lengths make up for attention. Later slices attend to more tokens; with
    lengths of equal cost, the step is as short as without attention."""
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
    """An eager warm-up hides messages. Here 8 ranks have 32 microbatches of 8 slices, and a message
    takes a fifth of the F of a slice."""
    costs = "f=1,i=1,w=1,comm=0.2"
    lean, eager = (figures(built(f"1f1b:eager={e}", 8, 32, 8, costs)) for e in ("no", "yes"))
    assert lean == pytest.approx((109.8, 1.875), abs=0.05)
    assert eager == pytest.approx((99.0, 2.75), abs=0.05)


@pytest.mark.parametrize(
    ("comm", "limit", "eager"), [(0.2, None, "yes"), (0.2, 2.0, "no"), (0, None, "no")]
)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_an_eager_warm_up_is_chosen_by_costs_and_limit(name, comm, limit, eager) -> None:
    problem = problem_for(name, 4, 8, 4, f"f=1,i=1,w=1,comm={comm}")
    if limit is not None:
        problem = replace(problem, memory_limit=MemoryLimit(microbatches=limit))
    assert choose(name).build(problem) == choose(f"{name}:eager={eager}").build(problem)
    whole = problem.with_options(slices=Slices())
    assert choose(name).build(whole) == choose(f"{name}:eager=no").build(whole)
    with pytest.raises(ValueError, match="eager is 'true'; write eager=auto"):
        choose(f"{name}:eager=true").build(problem)


# --- orders that must not be used


def test_the_published_interleaved_warm_up_hangs_where_slices_are_more_than_ranks() -> None:
    """The published interleaved warm-up (Seq1F1B-I) hangs if there are more slices than ranks. A
    rank would run the backward pass of a microbatch whose forward pass has not ended.

    Here p = 4 ranks have v = 2 chunks each, and a microbatch has k = 8 slices. Groups have p
    slices, and rank r runs (v-1)p + 2(p-1-r) + k-1 forward passes first.
    """
    p, m, k, chunks = 4, 8, 8, 2
    problem = problem_for("interleaved", p, m, k)
    there = list(batched(problem.forwards, p))
    back = list(batched(problem.backwards, p))
    rows = []
    for rank, stages in enumerate(problem.placement.stages_of):
        forwards = [Action(s, F, part) for ks in there for s in stages for part in ks]
        backwards = [Action(s, B, part) for ks in back for s in stages[::-1] for part in ks]
        lead = (chunks - 1) * p + 2 * (p - 1 - rank) + k
        row = forwards[:lead]
        for n, action in enumerate(backwards):
            row += [action, *forwards[lead + n : lead + n + 1]]
        rows.append(tuple(row))
    theirs = Schedule("theirs", problem.placement, tuple(rows))
    with pytest.raises(InvalidSchedule, match=r"6B0\.7 comes before 6F0\.7, which it needs"):
        complete(theirs, problem)
    ours = built("interleaved", p, m, k)
    assert figures(ours) == (24.5625, 1.375)


@pytest.mark.parametrize(
    ("p", "k", "m"),
    [(2, 3, 1), (4, 2, 3), *at_night(*product([2, 3, 4], [2, 3, 4, 6], [1, 3, 4]))],
)
def test_every_size_is_sound(p: int, k: int, m: int) -> None:
    """Slices are sound at every size: `prove` accepts the programs, and weight gradients are summed
    in one order."""
    for name in TAKES_SLICES:
        program = built(name, p, m, k, "f=3,i=4,w=2,comm=0.1,attention=0.3", "balanced")
        assert bitwise_order(program.schedule), name
        assert program.schedule.arrays.slices == k


TAKES_SLICES = [
    name
    for name, entry in entries().items()
    if entry.traits.takes_slices and not entry.traits.searches
]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0F0.1 0F0.0 0B0.1 0B0.0", r"0F0\.1 comes before 0F0\.0, which it needs"),
        ("0F0.0 0F0.1 0B0.0 0B0.1", r"0B0\.0 comes before 0B0\.1, which it needs"),
        ("0F0.0 0F0.1 0I0.1 0I0.0 0W0.0", r"0W0\.1 is missing"),
        ("0F0.0 0B0.0", r"0F0\.1 is missing"),
        ("0F0 0B0", r"it has 0F0, and microbatches are cut into 2 slices"),
        ("0F0.0 0F0.1 0B0.1 0B0.0 0F1.0 0F1.1", r"0F1\.0 is of microbatch 1, and .* 0 to 0"),
    ],
)
def test_what_is_wrong_is_named(rows: str, message: str) -> None:
    problem = problem_for("1f1b", 1, 1, 2)
    cut = 2 if "." in rows else 1
    schedule = Schedule(
        "wrong", problem.placement, (tuple(parse_action(a, cut) for a in rows.split()),)
    )
    with pytest.raises(InvalidSchedule, match=message):
        check_compute(schedule, problem)


def test_stages_take_slices_in_one_order() -> None:
    """All stages must run slices in the same order. Here stage 1 runs the slices of each microbatch
    in order but alternates between two microbatches, as stage 0 does not; this is refused."""
    problem = problem_for("1f1b", 2, 2, 2)
    backward = "{0}B0.1 {0}B0.0 {0}B1.1 {0}B1.0"
    rows = (
        "0F0.0 0F0.1 0F1.0 0F1.1 " + backward.format(0),
        "1F0.0 1F1.0 1F0.1 1F1.1 " + backward.format(1),
    )
    actions = tuple(tuple(parse_action(a, 2) for a in row.split()) for row in rows)
    schedule = Schedule("wrong", problem.placement, actions)
    with pytest.raises(InvalidSchedule, match=r"1F1\.0 is the forward number 2 of stage 1") as why:
        check_compute(schedule, problem)
    assert [str(action) for action in why.value.actions] == ["1F1.0", "0F0.1"]


def test_slices_that_are_not_requested() -> None:
    problem = problem_for("1f1b", 1, 1, 1)
    schedule = built("1f1b", 1, 1, 2).schedule
    with pytest.raises(InvalidSchedule, match=r"it has 0F0\.0, and .* are not cut"):
        check_compute(schedule, problem)


def test_w_may_come_in_any_order_which_bitwise_order_reports() -> None:
    problem = problem_for("zb-h1", 1, 1, 2)
    orders = {"0W0.1 0W0.0": True, "0W0.0 0W0.1": False}
    for weights, is_in_order in orders.items():
        row = tuple(parse_action(a, 2) for a in f"0F0.0 0F0.1 0I0.1 0I0.0 {weights}".split())
        schedule = Schedule("mine", problem.placement, (row,))
        check_compute(schedule, problem)
        assert bitwise_order(schedule) is is_in_order


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_parallel": VocabularyParallel.TWO},
        {"steps_overlap": True},
    ],
)
def test_what_does_not_go_with_slices(options: dict[str, Any]) -> None:
    problem = problem_for("1f1b", 2, 2, 2, "f=1,i=1,w=1,d2h=1")
    with pytest.raises(ValueError, match="division into 2 slices does not go with"):
        problem.with_options(**options)


def test_a_family_without_an_order_for_slices(tmp_path: Path) -> None:
    mine = tmp_path / "own.py"
    mine.write_text(OWN.replace(", takes_slices=True", ""))
    with pytest.raises(ValueError, match=r"own\.py cannot cut sequences into 2 slices.* zb-v"):
        built(str(mine), 2, 2, 2)


# --- text forms


def test_the_text_of_a_slice() -> None:
    action = Action(3, F, Slice(7, 2, even_ends(4)))
    assert str(action) == "3F7.2" and parse_action("3F7.2", slices=4) == action
    copy = pickle.loads(pickle.dumps(action))
    for part in (action.microbatch, copy.microbatch):
        assert isinstance(part, Slice)
        assert (part.microbatch, part.slice, int(part), part.ends) == (7, 2, 30, even_ends(4))


@pytest.mark.parametrize(
    ("text", "slices", "message"),
    [
        ("3F7", 4, "3F7 names no slice of its microbatch, and other"),
        ("3F7.1", 1, "3F7.1 names a slice of its microbatch, and"),
        ("3F7.4", 4, "slices are numbered 0 to 3"),
        ("3F7.", 4, "'3F7.' is not an action"),
    ],
)
def test_texts_that_are_no_slice(text: str, slices: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_action(text, slices)


def test_csv(tmp_path: Path) -> None:
    """A CSV table of slices can be read, `prove` accepts it, and its slices are cut as in the
    step."""
    made = built("zb-h1", 3, 4, 2, "f=1,i=1,w=1,attention=0.5", "balanced")
    text = to_csv(made.schedule)
    assert text.startswith("0F0.0,0F0.1,0F1.0,")
    assert from_csv(text, "mine").rows == made.schedule.compute_rows
    (tmp_path / "mine.csv").write_text(text)
    resolved = choose(str(tmp_path / "mine.csv"))
    assert (resolved.microbatches, resolved.slices) == (4, 2)
    again = build_program(resolved, made.problem)
    assert again.digest == made.digest and figures(again) == figures(made)
    with pytest.raises(
        ValueError,
        match="for 2 slices of a microbatch, and this step has 4 slices: write --pipeline-s",
    ):
        build_program(resolved, made.problem.with_options(slices=Slices(4)))


def test_a_table_that_leaves_slices_out() -> None:
    with pytest.raises(ValueError, match="of slice 2, but no action is of slice 1"):
        from_csv("0F0.0,0F0.2,0B0.2,0B0.0", "mine")
    with pytest.raises(ValueError, match="0B0 names no slice of its microbatch"):
        from_csv("0F0.0,0F0.1,0B0", "mine")


def test_another_cut_is_another_program() -> None:
    even, balanced = (built("1f1b", 2, 2, 2, "f=1,i=1,w=1,attention=0.5", how) for how in Lengths)
    assert even.digest != balanced.digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("equal", "slice lengths equal: write even, balanced"),
        ("0,4", "write even, balanced"),
        ("4,4", "2 slice lengths are given for 4 slices"),
    ],
)
def test_wrong_lengths_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Slices(4, parse_lengths(text))


def test_lengths_without_slices() -> None:
    with pytest.raises(ValueError, match="balanced are given without a number of slices"):
        Slices(1, Lengths.BALANCED)


def test_joined_weights_without_slices() -> None:
    with pytest.raises(ValueError, match="are to be joined, but no number of slices"):
        Slices(joined_weights=True)


def test_lengths_in_tokens() -> None:
    problem = problem_for("1f1b", 2, 2, 4, "f=1,i=1,w=1,attention=0.5", "balanced")
    lengths = problem.slice_lengths(4096, multiple_of=16)
    assert sum(lengths) == 4096 and sorted(lengths, reverse=True) == list(lengths)
    assert all(length % 16 == 0 for length in lengths)
    given = problem_for("1f1b", 2, 2, 2, "f=1,i=1,w=1", "96,32")
    assert given.slice_lengths(128, 32) == (96, 32)
    assert given.slice_ends == (0.75, 1.0)
    with pytest.raises(ValueError, match="96,32 sum up to 128; the sequence has 256"):
        given.slice_lengths(256)
    with pytest.raises(ValueError, match="48 tokens cannot be cut into 4 slices whose lengths"):
        problem.slice_lengths(48, multiple_of=16)
    assert lengths_of((0.98, 0.99, 1.0), 4) == (2, 1, 1)


# --- costs and memory


def test_costs_of_slices() -> None:
    """Slice j of k with equal tokens takes (1-a)/k + a(2j+1)/k^2 of F, where a is the share of
    attention. W has no attention."""
    problem = problem_for("zb-h1", 2, 1, 4, "f=8,i=12,w=4,comm=1,attention=0.5,latency=0.2")
    costs = problem.costs
    parts = problem.parts(0)
    assert [costs.of(Action(0, F, part)) for part in parts] == [1.25, 1.75, 2.25, 2.75]
    assert [costs.of(Action(0, W, part)) for part in parts] == [1, 1, 1, 1]
    # Attention takes half of the seconds of I and W together, all of them in I.
    assert [costs.of(Action(0, I, part)) for part in parts] == [1.5, 2.5, 3.5, 4.5]
    assert costs.of(Action(0, Kind.SEND_F, parts[0])) == pytest.approx(0.2 + 0.8 / 4)
    assert costs.of(Action(0, F, 0)) == 8 and costs.of(Action(0, Kind.SEND_F, 0)) == 1
    assert costs.attention_share == pytest.approx(0.5)


def test_joined_w_takes_its_fixed_part_once() -> None:
    """A joined W takes its fixed part once, with the W of the first slice. A W of its own takes it
    for each slice."""
    problem = problem_for("zb-h1", 2, 1, 4, "f=8,i=12,w=4,fixed_w=2")
    parts = problem.parts(0)
    assert [problem.costs.of(Action(0, W, part)) for part in parts] == [2.5] * 4
    joined = problem.costs.with_slices(joined_weights=True)
    assert [joined.of(Action(0, W, part)) for part in parts] == [2.5, 0.5, 0.5, 0.5]
    assert joined.of(Action(0, Kind.FULL_BACKWARD, parts[3])) == 5.5, "W of a whole B stands alone"
    assert joined.least_on([0], 4) == 24 < problem.costs.least_on([0], 4) == 30


@pytest.mark.parametrize("spec", ["zb-h1", "zb-v", "v-half", "zb-auto", "dualpipe-v"])
def test_joined_w_follow_each_other_and_save_the_fixed_part(spec: str) -> None:
    """Joined W of all slices of a microbatch follow each other, from the last slice to the first,
    and save the fixed part."""
    apart = problem_for(spec, 2, 3, 4, "f=10,i=10,w=10,fixed_w=6")
    slices = replace(apart.slices, joined_weights=True)
    program = build_program(choose(spec), apart.with_options(slices=slices))
    for row in program.schedule.rows:
        passes = [action for action in row if action.kind in (F, I, W, Kind.FULL_BACKWARD)]
        assert not any(action.kind is Kind.FULL_BACKWARD for action in passes)
        for place, action in enumerate(passes):
            if (
                action.kind is W
                and isinstance(action.microbatch, Slice)
                and action.microbatch.is_last
            ):
                group = passes[place : place + 4]
                assert [one.kind for one in group] == [W] * 4
                assert [int(one.microbatch) for one in group] == [
                    action.microbatch - number for number in range(4)
                ]
    made = simulate(program, program.problem.costs).makespan
    assert made < simulate(build_program(choose(spec), apart), apart.costs).makespan


@pytest.mark.parametrize(
    "options", [{"activation_offload": Offload.FULL}, {"recompute": Recompute(fit=True)}]
)
def test_joined_w_without_what_does_not_know_them(options: dict[str, Any]) -> None:
    """Joined W do not go with activation offload or recompute.

    Offload would free the inputs of a slice's weights at the slice's own W, but the last W needs
    them all. The peak that the proof computed used to be half of what a rank held.
    """
    problem = problem_for("zb-h1", 2, 3, 4, "f=10,i=10,w=10,d2h=1,h2d=1")
    slices = replace(problem.slices, joined_weights=True)
    limited = replace(problem, memory_limit=MemoryLimit(microbatches=1.8))
    with pytest.raises(ValueError, match="of slices do not go with"):
        build_program(choose("zb-h1"), limited.with_options(slices=slices, **options))


def test_joined_w_are_within_the_limit_of_a_search() -> None:
    """A search counts that joined W store more activations until the last slice. Searches used to
    ignore it: a limit that sufficed for an order with a W for each slice led to an order with
    joined W that was refused."""
    apart = problem_for("zb-auto", 4, 6, 4, "f=10,i=10,w=10,fixed_w=3")
    slices = replace(apart.slices, joined_weights=True)
    for allowed in (3.0, 1.75):
        limited = replace(apart, memory_limit=MemoryLimit(microbatches=allowed))
        program = build_program(choose("zb-auto"), limited.with_options(slices=slices))
        held = peaks(program.schedule, in_microbatches(program.schedule))
        assert max(held) <= allowed
        w = [int(one.microbatch) for one in program.schedule.rows[0] if one.kind is W]
        assert w == [k for m in range(6) for k in range(4 * m + 3, 4 * m - 1, -1)]
    too_small = replace(apart, memory_limit=MemoryLimit(microbatches=1.1))
    with pytest.raises(ValueError, match=r"over the memory limit of 1\.1 microbatches"):
        build_program(choose("zb-auto"), too_small.with_options(slices=slices))


def test_a_schedule_without_w_joins_none() -> None:
    problem = problem_for("1f1b", 2, 3, 4, "f=1,i=1,w=1")
    joined = problem.with_options(slices=replace(problem.slices, joined_weights=True))
    with pytest.raises(ValueError, match="schedule 1f1b does not split backward passes"):
        build_program(choose("1f1b"), joined)


def test_costs_are_written_and_read(tmp_path: Path) -> None:
    placement = line(2)
    text = "f=8/8,i=12/12,w=4/4,comm=1,attention=0.5/0.25,latency=0.2"
    costs = parse_costs(text, placement)
    assert format_costs(costs) == text
    held = {Held.ACTIVATION: (64.0, 64.0), Held.WEIGHT_INPUTS: (32.0, 32.0)}
    costs = costs.with_passes(held_bytes=held).with_slices(keys_values=(16.0, 16.0))
    save_costs(costs, tmp_path / "costs.json")
    read = load_costs(tmp_path / "costs.json", placement)
    assert (read.slices.attention, read.links.latency, read.slices.keys_values) == (
        (0.5, 0.25),
        0.2,
        (16.0, 16.0),
    )
    for wrong in ("attention=2", "latency=2", "attention=0.1/0.1/0.1"):
        with pytest.raises(ValueError, match=wrong.partition("=")[0]):
            parse_costs(f"f=8,i=12,w=4,comm=1,{wrong}", placement)


def with_bytes(problem: Problem) -> Problem:
    held = {Held.ACTIVATION: (64.0,), Held.WEIGHT_INPUTS: (32.0,)}
    costs = problem.costs.with_passes(held_bytes=held).with_slices(keys_values=(16.0,))
    return replace(problem, costs=costs)


def test_bytes_of_slices() -> None:
    """The memory of slices in bytes: a slice holds its share of activations from F to I, and of the
    inputs of W until W. Gradients of keys and values are summed for the whole microbatch, from the
    I of the last slice to that of the first."""
    problem = with_bytes(problem_for("zb-h1", 1, 1, 2))
    text = "0F0.0 0F0.1 0I0.1 0W0.1 0I0.0 0W0.0"
    row = tuple(parse_action(action, 2) for action in text.split())
    assert memory_curve(row, in_bytes(problem.costs)) == [32, 64, 80, 64, 48, 16]


def test_recompute_keeps_keys_and_values() -> None:
    """Recompute frees everything of a slice but its keys and values, to which later slices
    attend."""
    problem = with_bytes(problem_for("1f1b", 1, 1, 2)).with_options(recompute=Recompute(first=1))
    program = build_program(choose("1f1b"), problem)
    assert program.text == "0F0.0,0F0.1,0R0.1,0B0.1,0R0.0,0B0.0\n"
    # F of each of the two slices stores half of the input's 6.4 bytes and half of the keys' and
    # values' 16; R stores the rest of the slice's 32.
    curve = memory_curve(program.schedule.rows[0], in_bytes(problem.costs))
    assert curve == pytest.approx([11.2, 22.4, 43.2, 59.2, 48, 48])


def offloaded(name: str, way: Offload, k: int = 4) -> Program:
    costs = "f=1,i=1,w=1,comm=0.01,attention=0.3,d2h=0.5"
    problem = problem_for(name, 4, 6, k, costs)
    held = {Held.ACTIVATION: (64.0,) * 4, Held.WEIGHT_INPUTS: (32.0,) * 4}
    known = problem.costs.with_passes(held_bytes=held).with_slices(keys_values=(16.0,) * 4)
    return build_program(
        choose(name), replace(problem, costs=known).with_options(activation_offload=way)
    )


def test_offload_of_slices_leaves_keys_and_values() -> None:
    """Offload of slices keeps keys and values on the rank for later slices, so they take no time on
    the link."""
    program = offloaded("1f1b", Offload.FULL)
    costs, row = program.problem.costs, program.schedule.rows[0]
    part = program.problem.parts(0)[0]
    assert costs.of(Action(0, Kind.OFFLOAD_F, part)) == pytest.approx(0.5 / 4 * 48 / 64)
    staying, leaving = (
        (peaks(made.schedule, in_bytes(costs))[0], simulate(made, costs).makespan)
        for made in (offloaded("1f1b", Offload.NONE), program)
    )
    assert leaving[0] < 0.7 * staying[0] and leaving[1] == pytest.approx(staying[1])
    assert peak_on_host(row, program.problem.placement) == 2.5
    by_hand = "0F0.0 0OFFLOAD_F0.0 0FREE_F0.0 0F0.1 0RELOAD_F0.0 0B0.1 0B0.0"
    actions = tuple(parse_action(action, 2) for action in by_hand.split())
    assert list(held_during(actions, in_bytes(costs))) == [32, 32, 32, 40, 64, 80, 48]


def test_the_first_half_of_the_slices_leaves() -> None:
    """If half of the activations are offloaded, they are those of the first half of a microbatch's
    slices, which live longest (SPPO)."""
    for row in offloaded("1f1b", Offload.HALF).schedule.rows:
        gone = {a.microbatch % 4 for a in row if a.kind is Kind.OFFLOAD_F}
        assert gone <= {0, 1}


def test_uneven_slices_hold_by_their_tokens() -> None:
    program = built("gpipe", 1, 1, 2, "f=1,i=1,w=1", "3,1")
    curve = memory_curve(program.schedule.rows[0], in_microbatches(program.schedule))
    assert curve == [0.75, 1, 1, 0.75]


@pytest.mark.search
def test_zb_auto_of_slices() -> None:
    """The step of the schedule zb-auto, run on slices of sequences, is no longer than that of other
    schedules on a linear placement, within its memory limit."""
    costs = "f=10,i=12,w=8,comm=1,attention=0.3"
    best, h1 = (figures(built(name, 3, 4, 2, costs))[0] for name in ("zb-auto", "zb-h1"))
    assert best <= h1
    limited = replace(problem_for("zb-auto", 3, 4, 2), memory_limit=MemoryLimit(microbatches=1.5))
    program = build_program(choose("zb-auto"), limited)
    assert max(peaks(program.schedule, in_microbatches(program.schedule))) <= 1.5 + 1e-9


@pytest.mark.parametrize("name", TAKES_SLICES)
def test_no_schedule_of_slices_is_shorter_than_the_bound(name: str) -> None:
    """No schedule of slices is shorter than its lower bound.

    The bound of whole microbatches is longer than a step of slices. ``auto`` used to apply it, and
    so rejected schedules of slices that were shorter.
    """
    problem = problem_for(name, 3, 3, 3, "f=10,i=12,w=8,comm=1,attention=0.3", "balanced")
    splits = choose(name).traits.splits_backward
    least = makespan(choose(name).build(problem), problem)
    assert lower_bound(problem, splits) <= least * (1 + 1e-9)
    if name == "zb-v":
        assert least < lower_bound(problem.with_options(slices=Slices()), splits)


def test_a_bound_is_not_certified() -> None:
    with pytest.raises(ValueError, match="no lower bound for schedules with slices"):
        certify(built("1f1b", 2, 2, 2), 1.0)


# --- commands


def run(*words: str) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_simulate_describes_slices_and_verify_accepts_its_table(tmp_path: Path) -> None:
    table, trace = tmp_path / "mine.csv", tmp_path / "trace.json"
    cut = ["--slices", "2", "--slice-lengths", "balanced", "--costs", "f=1,i=1,w=1,attention=0.3"]
    files = ["--csv", str(table), "--perfetto", str(trace)]
    said = " ".join(run("simulate", "zb-h1", "--pp", "2", "-m", "3", *cut, *files).split())
    assert "slices of a microbatch 2, balanced" in said
    assert "but for rounding; to the last bit those of other schedules of these slices" in said
    assert "0F0.1" in trace.read_text()
    proved = run("verify", str(table))
    assert "valid: 2 ranks, 2 stages, 3 microbatches of 2 slices; a rank holds" in proved
    assert "every stage takes its slices in one order" in proved
    figures_of = json.loads(run("simulate", str(table), "--pp", "2", "-m", "3", *cut, "--json"))
    assert (figures_of["slices"], figures_of["slice_lengths"]) == (2, "balanced")


def test_simulate_joins_w() -> None:
    words = ["zb-v", "--pp", "4", "-m", "4", "--slices", "2", "--costs", "f=10,i=10,w=10,fixed_w=3"]
    joined = [*words, "--join-slice-weights"]
    assert "2, even, their W joined" in run("simulate", *joined)
    of = [json.loads(run("simulate", *given, "--json")) for given in (words, joined)]
    assert [made["join_slice_weights"] for made in of] == [False, True]
    assert [made["makespan"] for made in of] == [141, 132.5], "as docs/slices.md has them"


OWN = """
from megatron_ext.families import Action, Kind, Problem, Schedule, family, line

@family("own-slices", line, source="a test", takes_slices=True)
def own(problem: Problem) -> Schedule:
    passes = (Kind.FORWARD, problem.forwards), (Kind.FULL_BACKWARD, problem.backwards)
    row = tuple((kind, k) for kind, order in passes for k in order)
    rows = tuple(tuple(Action(r, kind, k) for kind, k in row) for r in range(problem.ranks))
    return Schedule("own-slices", problem.placement, rows)
"""


def test_a_family_of_a_users_takes_slices(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    made = built(str(tmp_path / "own.py"), 2, 2, 2)
    assert made.schedule.rows == built("gpipe", 2, 2, 2).schedule.rows


def test_plan_compares_schedules_of_slices() -> None:
    flags = ["--pipeline-slices", "2", "--pipeline-slice-lengths", "balanced"]
    asked = ["plan", "pp=2,m=2", *flags]
    said = run(*asked, "--all", "--costs", "f=10,i=12,w=8,attention=0.3")
    assert re.search(r"^verdict: +--pipeline-schedule \S+ --pipeline-slices 2 "
                     r"--pipeline-slice-lengths balanced$", said, re.MULTILINE)  # fmt: skip
    assert re.search("^now: +Megatron's 1f1b, is not compared", said, re.MULTILINE)
    assert "zb-h1" in said and "hanayo" in said
