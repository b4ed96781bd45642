"""Tests of post-validation: the places of its actions, what the proof refuses, and what a step then
costs."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.build import build_program, complete
from megatron_ext.compile.overlap import check_overlaps, what_overlapping_gains
from megatron_ext.compile.program.graph import channels
from megatron_ext.compile.program.memory import in_microbatches, memory_curve, peaks
from megatron_ext.compile.program.simulate import simulate, simulate_steps, step_seconds
from megatron_ext.compile.program.speculation import settles_at
from megatron_ext.compile.program.verify import InvalidSchedule, Program, prove
from megatron_ext.compile.registry import choose, entries
from megatron_ext.features.post_validation.schedule import validate_afterwards
from megatron_ext.observe.program_summary import summarize
from megatron_ext.observe.trace import TraceFile, read_trace, traced_steps
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import P2P, Offload, Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule, is_compute
from megatron_ext.search import improve
from megatron_ext.search.bounds import lower_bound
from megatron_ext.search.improve import _mirrored, packers_of
from megatron_ext.search.job_shop import job_shop_of, starts_of
from megatron_ext.search.job_shop import rows_of as rows_packed
from megatron_ext.search.pack import packer
from megatron_ext.viz.draw import draw_steps
from tests.helpers.combinations import in_pairs
from tests.helpers.few_families import only_families
from tests.helpers.random_schedules import PROPERTY, random_case, seeds
from tests.helpers.schedules import F, rows_of, with_messages, written
from tests.helpers.short_search import shorten_search

EQUAL, USUAL = "f=1,i=1,w=1", "f=10,i=12,w=8,comm=1"
ADDED = {Kind.RECV_P, Kind.STEP, Kind.SEND_P, Kind.RECV_V, Kind.SETTLE, Kind.SEND_V}


def problem(name: str, p: int, m: int, costs: str = EQUAL, *, validated: bool = True) -> Problem:
    placement = choose(name).place(p)
    return Problem(
        placement,
        m,
        parse_costs(costs, placement),
        options=ScheduleOptions(steps_overlap=validated),
    )


@functools.cache
def program(name: str, p: int, m: int, costs: str = EQUAL, *, validated: bool = True) -> Program:
    return build_program(choose(name), problem(name, p, m, costs, validated=validated))


# --- the places of its actions

LINE = """
0RECV_V0 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 0F4 0SETTLE0 0SEND_F4 0RECV_B0 \
0WAIT_F0 0WAIT_F1 0WAIT_F2 0I0 0RECV_B1 0W0 0WAIT_F3 0I1 0RECV_B2 0W1 0WAIT_F4 0I2 0RECV_B3 0W2 \
0I3 0RECV_B4 0W3 0I4 0W4 0STEP0 0SEND_P0
1RECV_V0 1SEND_V0 1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_F2 1F1 1SEND_F1 1RECV_F3 1F2 1SETTLE0 \
1SEND_F2 1RECV_B0 1RECV_F4 1WAIT_F0 1I0 1SEND_B0 1RECV_B1 1F3 1SEND_F3 1WAIT_F1 1I1 1SEND_B1 \
1RECV_B2 1F4 1SEND_F4 1WAIT_F2 1I2 1SEND_B2 1RECV_B3 1W0 1WAIT_F3 1I3 1SEND_B3 1RECV_B4 1W1 \
1WAIT_F4 1I4 1SEND_B4 1W2 1W3 1W4 1WAIT_B0 1WAIT_B1 1WAIT_B2 1WAIT_B3 1WAIT_B4 1RECV_P0 1STEP0 \
1SEND_P0
2SEND_V0 2RECV_F0 2RECV_F1 2SETTLE0 2F0 2RECV_F2 2I0 2SEND_B0 2F1 2I1 2SEND_B1 2RECV_F3 2F2 2I2 \
2SEND_B2 2RECV_F4 2WAIT_B0 2F3 2I3 2SEND_B3 2WAIT_B1 2F4 2I4 2SEND_B4 2W0 2W1 2W2 2W3 2W4 \
2WAIT_B2 2WAIT_B3 2WAIT_B4 2RECV_P0 2STEP0
"""
V = """
1SEND_V0 1RECV_F0 1RECV_F1 1F0 2F0 2SEND_F0 1F1 2F1 1SETTLE0 2SEND_F1 2RECV_B0 2WAIT_F0 2I0 2W0 \
2RECV_B1 1I0 1SEND_B0 2WAIT_F1 2I1 1I1 1SEND_B1 1W0 2W1 1W1 1WAIT_B0 1WAIT_B1 1RECV_P0 1STEP0
0RECV_V0 0F0 0SEND_F0 0F1 0SEND_F1 3RECV_F0 0WAIT_F0 0SETTLE0 3F0 3RECV_F1 3I0 3SEND_B0 3W0 \
0WAIT_F1 3F1 3I1 3SEND_B1 0RECV_B0 3W1 3WAIT_B0 0I0 0RECV_B1 0W0 3WAIT_B1 0I1 0W1 0STEP0 \
0SEND_P0
"""


@pytest.mark.parametrize(("name", "p", "m", "text"), [("zb-h2", 3, 5, LINE), ("zb-v", 2, 2, V)])
def test_rows(name: str, p: int, m: int, text: str) -> None:
    assert program(name, p, m).schedule.rows == rows_of(text)


def test_one_rank_knows_the_verdict_itself() -> None:
    assert program("1f1b", 1, 1).schedule.rows == rows_of("0SETTLE0 0F0 0B0 0STEP0")


@pytest.mark.parametrize(
    "name", [n for n, entry in entries().items() if not entry.traits.uses_costs]
)
def test_all_else_is_as_without(name: str) -> None:
    """Post-validation changes nothing else: a step has the same passes in the same order, and the
    same messages on the same channels."""
    with_it, without = (program(name, 4, 8, validated=v).schedule for v in (True, False))
    assert with_it.compute_rows == without.compute_rows
    assert channels(with_it) == channels(without)
    for ours, plain in zip(with_it.rows, without.rows, strict=True):
        added = [action for action in ours if action.kind in ADDED]
        assert sorted(ours) == sorted([*plain, *added])
        for stage, kind in {(action.stage, action.kind) for action in plain}:
            on_channel = [[a for a in row if a[:2] == (stage, kind)] for row in (ours, plain)]
            assert on_channel[0] == on_channel[1]


@pytest.mark.parametrize("name", ["zb-2p", "zb-v", "1f1b", "interleaved", "v-half"])
def test_the_verdict_is_waited_for_as_late_as_can_be(name: str) -> None:
    made = program(name, 4, 8)
    for rank, row in enumerate(made.schedule.rows):
        settles = settles_at(row)
        assert settles is not None
        later = next(n for n in range(settles, len(row)) if is_compute(row[n]))
        moved = (*row[:settles], *row[settles + 1 : later + 1], row[settles], *row[later + 1 :])
        rows = (*made.schedule.rows[:rank], moved, *made.schedule.rows[rank + 1 :])
        with pytest.raises(InvalidSchedule, match="verdict"):
            prove(replace(made.schedule, rows=rows), made.problem)


# --- refusals of the proof

SMALL = """
0RECV_V0 0F0 0SEND_F0 0F1 0SETTLE0 0SEND_F1 0RECV_B0 0WAIT_F0 0I0 0W0 0RECV_B1 0WAIT_F1 0I1 0W1 \
0STEP0 0SEND_P0
1SEND_V0 1RECV_F0 1SETTLE0 1RECV_F1 1F0 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1 1WAIT_B0 1WAIT_B1 \
1RECV_P0 1STEP0
"""
REFUSED = {
    "crossing send": ("0SEND_F1 0RECV_B0", "0RECV_B0", "0F1 0SETTLE0", "0F1 0SEND_F1 0SETTLE0",
                      "0SEND_F1 comes before the verdict on the last step, and 1RECV_F1 after it"),
    "crossing receive": ("1RECV_F0 1SETTLE0", "1SETTLE0 1RECV_F0", "", "",
                         "0SEND_F0 comes before the verdict on the last step, and 1RECV_F0 after"),
    "a backward": ("0F1 0SETTLE0", "0F1", "0I0 0W0", "0I0 0W0 0SETTLE0",
                   "0I0 cannot be undone, and comes before the verdict on the last step"),
    "a loss": ("1SETTLE0 1RECV_F1 1F0", "1RECV_F1 1F0 1SETTLE0", "", "",
               "1F0 cannot be undone, and comes before the verdict on the last step"),
    "a pass after the step": ("0W1 0STEP0", "0STEP0 0W1", "", "", "0STEP0 comes before 0W1"),
    "no step": (" 0STEP0", "", "", "", "nothing does the optimizer step on the partial state"),
    "two steps": ("0STEP0", "0STEP0 0STEP0", "", "", "0STEP0"),
    "no wait for the verdict": (" 0SETTLE0", "", "", "", "0SETTLE0 is missing on rank 0"),
    "no partial state": (" 0SEND_P0", "", "", "", "0SEND_P0 is missing on rank 0"),
    "verdict of nobody": ("1SEND_V0 1RECV_F0", "1RECV_V0 1SEND_V0 1RECV_F0", "", "",
                          "1RECV_V0 has no other rank to talk to"),
}  # fmt: skip


def small(text: str = SMALL) -> tuple[Problem, str]:
    placement = Placement("written", (0, 1))
    return Problem(
        placement, 2, uniform(placement, 1, 1, 1), options=ScheduleOptions(steps_overlap=True)
    ), text


def test_a_good_program_is_accepted() -> None:
    wanted, text = small()
    assert prove(written(text, (0, 1)), wanted)


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    old, new, second, instead, why = REFUSED[what]
    wanted, text = small()
    for before, after in ((old, new), (second, instead)):
        assert before in text
        text = text.replace(before, after, 1) if before else text
    with pytest.raises(InvalidSchedule) as caught:
        prove(written(text, (0, 1)), wanted)
    assert why in str(caught.value)
    for action in caught.value.actions:
        assert str(action) in str(caught.value)


def test_its_actions_are_refused_unless_post_validation_is_requested() -> None:
    wanted, text = small()
    with pytest.raises(InvalidSchedule, match="belongs to post-validation, which is not requested"):
        prove(written(text, (0, 1)), wanted.with_options(steps_overlap=False))


def test_an_evaluation_has_no_optimizer() -> None:
    evaluation = replace(problem("zb-v", 2, 2), forward_only=True)
    rows = build_program(choose("zb-v"), evaluation).schedule.rows
    assert not any(action.kind in ADDED for row in rows for action in row)
    forwards = written("0SETTLE0 0F0", (0,))
    alone = Placement("written", (0,))
    wanted = Problem(
        alone, 1, uniform(alone, 1, 1, 1), None, True, options=ScheduleOptions(steps_overlap=True)
    )
    with pytest.raises(InvalidSchedule, match="0SETTLE0"):
        prove(forwards, wanted)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vocab_parallel": VocabularyParallel.TWO}, "vocabulary parallelism 2"),
        ({"p2p": P2P.BATCHED}, "p2p batched"),
        ({"activation_offload": Offload.FULL}, "offload full"),
    ],
)
def test_what_does_not_go_with_it(changes: dict[str, Any], why: str) -> None:
    placement = Placement("v", (1, 0, 0, 1))
    costs = parse_costs(f"{EQUAL},d2h=1,h2d=1", placement)
    good = Problem(placement, 2, costs, options=ScheduleOptions(steps_overlap=True))
    with pytest.raises(ValueError, match=why):
        good.with_options(**changes)


def test_no_placement_whose_first_stages_share_a_rank() -> None:
    placement = Placement("mine", (0, 0, 1, 1))
    with pytest.raises(ValueError, match=r"and are \(0, 0\)"):
        Problem(
            placement, 2, uniform(placement, 1, 1, 1), options=ScheduleOptions(steps_overlap=True)
        )


# --- all schedules

NAMES = st.sampled_from(sorted(n for n, entry in entries().items() if not entry.traits.searches))
FIGURES = st.sampled_from([0.5, 1.0, 1.3, 2.0, 3.0])


@settings(PROPERTY, max_examples=25)
@given(
    NAMES,
    st.integers(1, 6),
    st.integers(1, 10),
    st.tuples(FIGURES, FIGURES, FIGURES),
    st.sampled_from([0.0, 0.1, 1.0, 10.0]),
)
def test_every_schedule(
    name: str, p: int, m: int, fiw: tuple[float, float, float], comm: float
) -> None:
    """Post-validation works with every schedule.

    `prove` accepts the program. Only forward passes without a loss come before the verdict. A step
    costs no more than without post-validation, and no less than the work of a rank.
    """
    resolved = choose(name)
    placement = resolved.place(p)
    wanted = Problem(
        placement, m, uniform(placement, *fiw, comm), options=ScheduleOptions(steps_overlap=True)
    )
    try:
        made = build_program(resolved, wanted)
    except InvalidSchedule:
        raise
    except ValueError:
        assume(False)  # the family has no schedule for so many microbatches
    for row in made.schedule.rows:
        settles = settles_at(row)
        before = [action for action in row[:settles] if is_compute(action)]
        assert all(a.kind is F and a.stage < placement.stages - 1 for a in before)
        steps = [n for n, action in enumerate(row) if action.kind is Kind.STEP]
        assert len(steps) == 1 and not any(map(is_compute, row[steps[0] :]))
    timeline = simulate(made, wanted.costs)
    cost = step_seconds(made, wanted.costs)
    busiest = max(sum(e.end - e.start for e in row) for row in timeline.compute)
    assert busiest * (1 - 1e-9) <= cost <= timeline.makespan * (1 + 1e-9)


@settings(PROPERTY, max_examples=60)
@given(seeds)
def test_any_order_of_passes(seed: int) -> None:
    """Post-validation works with any order of passes: for random schedules with random costs and
    placements, `prove` accepts the transformed programs."""
    case = random_case(seed)
    firsts = sorted(stages[0] for stages in case.problem.placement.stages_of)
    assume(firsts == list(range(case.problem.ranks)))
    wanted = case.problem.with_options(p2p=P2P.ASYNC, steps_overlap=True)
    made = validate_afterwards(with_messages(case.schedule, wanted), wanted)
    proved = prove(made, wanted)
    limit = simulate(proved, wanted.costs).makespan
    assert step_seconds(proved, wanted.costs) <= limit * (1 + 1e-9)


# --- the cost of a step

HEADLINE = [
    (name, p, k * p, costs)
    for name, p, k, costs in in_pairs(
        ["zb-2p", "zb-v", "zb-auto", "zb-h2"], [3, 5], [2, 4], [EQUAL, USUAL]
    )
]


@pytest.mark.search
@pytest.mark.parametrize(("name", "p", "m", "costs"), HEADLINE)
def test_a_step_costs_the_span(name: str, p: int, m: int, costs: str) -> None:
    made = program(name, p, m, costs)
    timeline = simulate(made, made.problem.costs)
    assert timeline.span < timeline.makespan
    assert step_seconds(made, made.problem.costs) == pytest.approx(timeline.span, rel=1e-9)


@pytest.mark.parametrize("name", ["zb-2p", "zb-v", "1f1b", "interleaved"])
def test_without_it_a_step_costs_the_makespan(name: str) -> None:
    """Without post-validation a step costs its makespan, also if steps are simulated one after the
    other: all ranks wait for the last one."""
    made = program(name, 4, 8, USUAL, validated=False)
    makespan = simulate(made, made.problem.costs).makespan
    assert step_seconds(made, made.problem.costs) == makespan
    steps = simulate_steps(made, made.problem.costs, 3)
    assert [step.start for step in steps] == pytest.approx([0, makespan, 2 * makespan])


def test_steps_follow_one_another_on_every_rank() -> None:
    made = program("zb-2p", 4, 8, USUAL)
    steps = simulate_steps(made, made.problem.costs, 4)
    for earlier, later in pairwise(steps):
        for before, after in zip(earlier.compute, later.compute, strict=True):
            assert before[-1].end <= after[0].start
        latest = max(row[-1].end for row in earlier.compute)
        assert later.start < latest  # the two steps overlap


def test_the_verdict_comes_after_every_step_and_before_what_lasts() -> None:
    made = program("zb-v", 4, 8, USUAL)
    first, second = simulate_steps(made, made.problem.costs, 2)
    stepped = max(e.end for e in first.events if e.action.kind is Kind.STEP)
    settled = [e for e in second.events if e.action.kind is Kind.SETTLE]
    assert len(settled) == 4 and all(event.end >= stepped for event in settled)


# --- memory


@pytest.mark.parametrize("name", ["zb-2p", "zb-v", "zb-h2", "1f1b", "interleaved-zb"])
@pytest.mark.parametrize("m", [3, 4, 8])
def test_memory_is_that_of_one_step(name: str, m: int) -> None:
    """Under post-validation a rank needs only the memory of one step.

    When it begins the next step, it holds nothing of the last one. The forward passes before the
    verdict hold what they would hold anyway, and no peak is higher.
    """
    made = program(name, 4, m, USUAL).schedule
    plain = program(name, 4, m, USUAL, validated=False).schedule
    amount = in_microbatches(made)
    assert peaks(made, amount) == peaks(plain, amount)
    for row in made.rows:
        twice = memory_curve(row + row, amount)
        assert max(twice) == pytest.approx(max(memory_curve(row, amount)))
        assert row[-1].kind in (
            Kind.STEP,
            Kind.SEND_P,
        )  # STEP and SEND_P come after all passes that free memory


# --- searches for it


@pytest.mark.search
@pytest.mark.parametrize("costs", [EQUAL, USUAL, "f=10,i=9,w=12,comm=3"])
def test_zb_auto_looks_for_the_least_step(costs: str) -> None:
    """The schedule zb-auto searches for the shortest step under post-validation: no longer than
    other schedules on a linear placement, within the same memory."""
    least = step_of("zb-auto", costs)
    for other in ("zb-h1", "zb-h2", "zb-1p", "zb-2p", "1f1b"):
        assert least <= step_of(other, costs) * (1 + 1e-9), other


def test_zb_auto_may_find_it_by_the_makespan() -> None:
    """With slow messages, the schedule zb-auto finds a shorter step than the schedule zb-2p. zb-2p
    is searched by the span of one step, which does not lead to the shortest step then; zb-auto is
    also searched by the makespan."""
    costs = "f=10,i=1,w=12,comm=8"
    assert step_of("zb-auto", costs, m=9) < step_of("zb-2p", costs, m=9) - 1


def test_loops_place_w_for_the_span() -> None:
    costs = "f=5,i=4,w=6,comm=3"
    order = program("interleaved-zb", 4, 8, costs, validated=False).schedule
    rows = replace(order, rows=order.compute_rows)
    same = replace(choose("interleaved-zb"), build=lambda _: rows)
    wanted = problem("interleaved-zb", 4, 8, costs)
    by_makespan = step_seconds(build_program(same, wanted), wanted.costs)
    assert step_of("interleaved-zb", costs) < by_makespan


def step_of(name: str, costs: str, m: int = 8) -> float:
    made = program(name, 4, m, costs)
    return step_seconds(made, made.problem.costs)


def test_v_auto_looks_for_the_least_span(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The schedule v-auto searches for the shortest span under post-validation, and finds another
    order than the search for the shortest makespan: its step is shorter than that of the schedule
    zb-v. The cache keeps the two searches apart."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shorten_search(monkeypatch)
    for name, value in (("_PERIODS", (90, 100)), ("_PROMISING", 4), ("_ROUNDS", 4)):
        monkeypatch.setattr(improve, name, value)
    without = build_program(choose("v-auto"), problem("v-auto", 4, 8, USUAL, validated=False))
    made = build_program(choose("v-auto"), problem("v-auto", 4, 8, USUAL))
    assert made.schedule.compute_rows != without.schedule.compute_rows
    assert step_seconds(made, made.problem.costs) < step_of("zb-v", USUAL)
    assert max(peaks(made.schedule, in_microbatches(made.schedule))) <= 4


def test_packing_for_the_span_keeps_ranks_to_their_turns() -> None:
    """Packing for the span keeps the order in which ranks begin. To the end of each rank it adds a
    tail: none for the rank that begins last, and the longest for the rank with the first stage.
    Packing backwards in time has the tails as earliest starts. The packed length is the span plus
    the time by which the last rank begins later."""
    wanted = problem("zb-v", 4, 8, USUAL)
    shop = job_shop_of(wanted)
    assert [shop.tick * tail for tail in shop.tails] == pytest.approx([0, 6, 12, 18])
    mirrored = shop.mirrored()
    assert (mirrored.release_times, mirrored.tails) == (shop.tails, shop.release_times)
    made = program("zb-v", 4, 8, USUAL)
    packers = packers_of(shop, packer)
    packed = packers.left(starts_of(made.schedule.compute_rows, shop))
    rows = rows_packed(packed.starts, wanted.placement)
    ran = complete(Schedule("packed", wanted.placement, rows), wanted)
    span = simulate(ran, wanted.costs).span
    assert packed.makespan * shop.tick == pytest.approx(18 + span)
    back = packers.right(_mirrored(packed, shop.pass_durations))
    first = back.starts.reshape(4, -1).min(axis=1)
    assert (first >= shop.tails).all()


@settings(PROPERTY, max_examples=20)
@example("zb-h2", 4, 8, 0.0)
@example("zb-v", 2, 2, 0.0)
@given(NAMES, st.integers(1, 5), st.integers(1, 8), st.sampled_from([0.0, 0.5, 3.0]))
def test_the_bound_holds_of_steps_that_overlap(name: str, p: int, m: int, comm: float) -> None:
    resolved = choose(name)
    placement = resolved.place(p)
    wanted = Problem(
        placement,
        m,
        uniform(placement, 2, 3, 2, comm),
        options=ScheduleOptions(steps_overlap=True),
    )
    try:
        made = build_program(resolved, wanted)
    except ValueError:
        assume(False)
    bound = lower_bound(wanted, resolved.traits.splits_backward)
    assert bound <= step_seconds(made, wanted.costs) * (1 + 1e-9)
    assert bound <= lower_bound(
        wanted.with_options(steps_overlap=False), resolved.traits.splits_backward
    )


def test_what_cannot_overlap_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nothing with 1f1b on 4 .* takes as long as without"):
        check_overlaps(program("1f1b", 4, 8, USUAL))
    check_overlaps(program("zb-2p", 4, 8, USUAL))
    assert "its span is its makespan;" in what_overlapping_gains(program("1f1b", 4, 8, USUAL))


def test_the_line_of_a_launch_compares_the_step_with_the_makespan() -> None:
    made = program("zb-2p", 4, 8, USUAL)
    assert "in the long run a step takes 6.2% less than the makespan" in summarize(made)
    assert "long run" not in summarize(program("zb-2p", 4, 8, USUAL, validated=False))


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout  # stderr has the progress


def test_simulate_prints_what_a_step_costs(tmp_path: Path) -> None:
    words = ["simulate", "zb-2p", "--pp", "4", "-m", "8", "--costs", USUAL, "--post-validation"]
    report = json.loads(run(*words, "--json"))
    assert (report["makespan"], report["span"], report["step"]) == (273, 256, pytest.approx(256))
    assert report["post_validation"] is True
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    text = run(*words, "--steps", "2", "--perfetto", str(trace), "--plot", str(picture))
    assert "in the long run a step takes 6.2% less than the makespan" in text
    events = json.loads(trace.read_text())["traceEvents"]
    passes = [event for event in events if event.get("cat") == "compute"]
    assert len(passes) == 2 * 4 * 3 * 8
    ends = [max(e["ts"] + e["dur"] for e in passes if e["args"]["step"] == n) for n in (0, 1)]
    starts = [min(e["ts"] for e in passes if e["args"]["step"] == n) for n in (0, 1)]
    assert starts[1] < ends[0] and ends[1] - ends[0] == pytest.approx(256e3)
    marks = [event for event in events if event["ph"] == "i"]
    assert sorted(m["name"] for m in marks) == sorted(
        2 * [f"{rank}{kind}0" for rank in range(4) for kind in ("STEP", "SETTLE")]
    )
    tracks = {(e["pid"], e["tid"]) for e in passes}
    assert all((mark["pid"], mark["tid"]) in tracks for mark in marks)
    svg = picture.read_text()
    assert "zb-2p: 2 steps, one every 273" in svg
    assert "zb-2p, post-validation: 2 steps, one every 256" in svg


def test_simulate_says_what_cannot_overlap() -> None:
    words = ["--pp", "4", "-m", "8", "--post-validation"]
    assert "1f1b's steps cannot overlap" in run("simulate", "1f1b", *words)
    assert "drop --certify or --post-validation" in run(
        "simulate", "zb-v", *words, "--certify", "1", code=2
    )


@pytest.mark.search
def test_plan_compares_what_steps_cost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    only_families(monkeypatch, "1f1b", "interleaved-zb", "zb-1p", "zb-2p", "zb-v")
    words = ["plan", "pp=4,m=8", "--costs", USUAL]
    report = json.loads(run(*words, "--pipeline-post-validation", "--json"))
    rows = {row["schedule"]: row for row in report["plan"]["candidates"]}
    steps = [row["step"] for row in report["plan"]["candidates"]]
    assert steps == sorted(steps) and rows["zb-2p"]["step"] == pytest.approx(256)
    assert rows["zb-2p"]["step"] < rows["interleaved-zb"]["step"] < rows["zb-2p"]["makespan"]
    assert "--pipeline-post-validation" in report["written"]["added"]
    without = json.loads(run(*words, "--json"))
    first = without["plan"]["candidates"][0]
    assert first["makespan"] == first["step"]
    assert "--pipeline-post-validation" not in without["written"]["added"]


# --- measured consecutive steps


def test_measured_steps_that_overlap_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Measured steps that overlap can be written to a trace and read again. Predicted steps are
    moved and stretched together, so that they overlap as predicted."""
    made = program("zb-2p", 4, 8, USUAL)
    predicted = simulate_steps(made, made.problem.costs, 3)
    measured = [step.moved(100 + 2 * step.start, 2.0) for step in predicted]
    steps = traced_steps([7, 8, 9], measured, predicted, 1e-6)
    for step in steps:
        assert step.cost_factor == pytest.approx(2)
        for mine, other in zip(step.predicted.events, step.measured.events, strict=True):
            assert (mine.start, mine.end) == pytest.approx((other.start, other.end))
    file = TraceFile(tmp_path / "trace.json")
    for step in steps:
        file.add(step)
    back = read_trace(tmp_path)
    assert [step.iteration for step in back] == [7, 8, 9]
    for step, wanted in zip(back, steps, strict=True):
        assert step.measured.start == pytest.approx(wanted.measured.start - 100)
        assert step.predicted.start == pytest.approx(wanted.predicted.start - 100)


def test_each_step_has_its_shade(tmp_path: Path) -> None:
    made = program("zb-v", 2, 4, USUAL)
    steps = simulate_steps(made, made.problem.costs, 2)
    for shown in (1, 2):
        draw_steps([steps[:shown]], tmp_path / f"{shown}.svg")
    first, both = ((tmp_path / f"{shown}.svg").read_text() for shown in (1, 2))
    kinds_and_chunks = 3 * 2
    assert " opacity: 0.45" not in first and both.count(" opacity: 0.45") == kinds_and_chunks
