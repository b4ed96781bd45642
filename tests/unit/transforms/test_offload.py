"""Tests of activations that are offloaded to the host: order, memory and time."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.build import build_program
from megatron_ext.compile.output_layer import (
    costs_in,
    output_layer_waits,
    place_output_layer,
)
from megatron_ext.compile.program.memory import in_bytes, in_microbatches, most_on_host, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import InvalidSchedule, Program, prove
from megatron_ext.compile.program.waits import await_sends
from megatron_ext.compile.registry import choose
from megatron_ext.compile.transforms.vocabulary_costs import share_vocabulary
from megatron_ext.features.offload.schedule.inserted_copies import offload
from megatron_ext.schedule.action import Kind, parse_action
from megatron_ext.schedule.costs import Costs, HostCosts, VocabularyCosts
from megatron_ext.schedule.costs_text import format_costs, parse_costs
from megatron_ext.schedule.kinds import HOST_LANES, RULES, Held, Lane
from megatron_ext.schedule.limit import MemoryLimit, parse_limit
from megatron_ext.schedule.placement import line, v
from megatron_ext.schedule.problem import P2P, Offload, Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.timeline import Event
from megatron_ext.search.certify import certify
from tests.helpers.combinations import at_night, in_pairs
from tests.helpers.random_schedules import PROPERTY, mutate, random_case, seeds
from tests.helpers.reference_runs import run
from tests.helpers.schedules import rows_of, without_waits
from tests.helpers.short_search import shorten_search

NONE, HALF, FULL, FIT = Offload
ALL = ("1f1b", "zb-h1", "zb-auto", "zb-v", "v-half", "v-min", "v-auto", "interleaved", "gis")


def problem_of(
    spec: str,
    ranks: int,
    k: float,
    how: Offload = NONE,
    *,
    more: str = "",
    limit: str | None = None,
    microbatches: int | None = None,
) -> Problem:
    """Return a problem with unit costs, in which both copies together take ``k`` times as long as F
    and I."""
    placement, m = choose(spec).place(ranks), microbatches or 4 * ranks
    costs = parse_costs(f"f=1,i=1,w=1,d2h={k},h2d={k}{more}", placement)
    allowed = None if limit is None else parse_limit(limit, ranks, m)
    return Problem(placement, m, costs, allowed, options=ScheduleOptions(activation_offload=how))


def built(spec: str, problem: Problem) -> Program:
    return build_program(choose(spec), problem)


@functools.cache
def without_copies(spec: str, ranks: int, k: float) -> Program:
    return built(spec, problem_of(spec, ranks, k))


@functools.cache
def all_copied(spec: str, ranks: int, k: float) -> Program:
    return built(spec, problem_of(spec, ranks, k, FULL))


def makespan(program: Program) -> float:
    return simulate(program, program.problem.costs).makespan


def chunks_held(program: Program) -> float:
    """Return the largest peak of the ranks, in chunks."""
    schedule = program.schedule
    return max(peaks(schedule, in_microbatches(schedule))) * schedule.placement.chunks


def copies(program: Program) -> list[Event]:
    events = simulate(program, program.problem.costs).events
    return [event for event in events if RULES[event.action.kind].lane in HOST_LANES]


@pytest.mark.parametrize(
    ("spec", "limit"),
    [("zb-auto", "1"), ("zb-auto", "0.6x"), ("v-auto", "0.5x"), ("gis-h", "1x"), ("1f1b", "1x")],
)
@pytest.mark.parametrize("how", [HALF, FULL])
@pytest.mark.parametrize("k", [0.2, 1000.0])
def test_what_fits_without_copies_fits_with_them(
    spec: str, limit: str, how: Offload, k: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that fits without copies to the host also fits with them. If copies do not help,
    as over a slow link, the order that fits stays.

    With copies, families used to place their passes without any limit. v-auto fitted within 0.5x,
    but with half of its activations copied it was refused. zb-auto trained within a limit of one
    microbatch, but with copies its first step ended in a traceback.
    """
    shorten_search(monkeypatch)
    allowed = problem_of(spec, 3, k, how, limit=limit, microbatches=6)
    build_program(choose(spec), allowed.with_options(activation_offload=NONE))  # fits
    program = build_program(choose(spec), allowed)
    held = max(peaks(program.schedule, in_microbatches(program.schedule)))
    assert allowed.memory_limit is not None and held <= allowed.memory_limit.amount


def test_copies_allow_looser_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies to the host, passes may exceed the limit that they would have alone. They fit
    while some of their activations are on the host, and the step is shorter than without copies."""
    shorten_search(monkeypatch)
    tight = problem_of("v-auto", 3, 0.2, microbatches=6, limit="0.5x")
    copied = tight.with_options(activation_offload=FULL)
    assert makespan(built("v-auto", copied)) < makespan(built("v-auto", tight))


def random_host_costs(random: Random, costs: Costs) -> Costs:
    """Return costs whose copies, at random, take no time, as long as passes, or longer; ranks may
    share links."""
    figures = [random.choice([(0.0,), (0.3, 1.0), (1.0, 9.0)]) for _ in range(2)]
    out, back = ([random.choice(choices) for _ in range(costs.stages)] for choices in figures)
    return costs.with_host(out, back, random.choice([1, 1, 2, 3]), random.random() < 0.7)


def random_problem(seed: int) -> tuple[Schedule, Problem]:
    random, case = Random(seed), random_case(seed)
    costs = random_host_costs(random, case.problem.costs)
    how = random.choice([HALF, FULL, FIT])
    limit = MemoryLimit(microbatches=random.choice([1.0, 2.0, 3.0])) if how is FIT else None
    problem = replace(case.problem, costs=costs, memory_limit=limit).with_options(
        p2p=P2P.ASYNC, activation_offload=how
    )
    return without_waits(case.schedule, problem), problem


def without_limit(problem: Problem) -> Problem:
    return replace(problem, memory_limit=MemoryLimit(microbatches=1e9))


# --- any schedule


@settings(PROPERTY, max_examples=70)
@given(seeds)
def test_any_schedule_takes_the_copies(seed: int) -> None:
    """Any schedule can have copies to the host.

    Each pass stays in its place, offloaded activations come back, and ranks that run in order reach
    the end. If no link is shared, passes run at the same times as without copies.
    """
    schedule, problem = random_problem(seed)
    made = await_sends(offload(schedule, problem), problem)
    assert made.compute_rows == schedule.compute_rows
    program = prove(made, without_limit(problem))
    other = run(made, problem)
    assert other.ended_well, other
    host = problem.costs.host
    assert host is not None
    if host.is_shared:
        return
    timeline = simulate(program, problem.costs)
    for event in timeline.events:
        assert other.times[event.action][1] == pytest.approx(event.end), event
    if problem.options.activation_offload is not FIT:
        without = prove(await_sends(schedule, problem), without_limit(problem))
        assert timeline.makespan == pytest.approx(makespan(without))
    amount = in_microbatches(schedule)
    assert all(a <= b for a, b in zip(peaks(made, amount), peaks(schedule, amount), strict=True))


@settings(PROPERTY, max_examples=75)
@given(seeds)
def test_what_is_damaged_is_proved_only_if_it_runs(seed: int) -> None:
    schedule, problem = random_problem(seed)
    problem = problem.with_options(activation_offload=FULL)
    problem = without_limit(problem)
    whole, random = await_sends(offload(schedule, problem), problem), Random(seed)
    for _ in range(3):
        damaged = mutate(whole, random)
        try:
            prove(damaged, problem)
        except InvalidSchedule:
            proved = False
        else:
            proved = True
        assert proved == run(damaged, problem, held_up=True).ended_well


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("0F0 0OFFLOAD_F0 0I0 0W0", "0FREE_F0 is missing"),
        ("0F0 0OFFLOAD_F0 0FREE_F0 0I0 0W0", "0RELOAD_F0 is missing"),
        ("0F0 0RELOAD_F0 0I0 0W0", "0OFFLOAD_F0 is missing"),
        ("0F0 0OFFLOAD_F0 0FREE_F0 0I0 0RELOAD_F0 0W0", "0I0 comes before 0RELOAD_F0"),
        ("0F0 0FREE_F0 0OFFLOAD_F0 0RELOAD_F0 0I0 0W0", "0FREE_F0 comes before 0OFFLOAD_F0"),
        ("0OFFLOAD_F0 0F0 0FREE_F0 0RELOAD_F0 0I0 0W0", "0OFFLOAD_F0 comes before 0F0"),
        ("0F0 0I0 0OFFLOAD_I0 0FREE_I0 0W0 0RELOAD_I0", "0W0 comes before 0RELOAD_I0"),
    ],
)
def test_what_is_wrong_is_named(row: str, why: str) -> None:
    placement = line(1)
    schedule = Schedule("wrong", placement, (tuple(map(parse_action, row.split())),))
    problem = Problem(
        placement,
        1,
        parse_costs("f=1,i=1,w=1,d2h=1", placement),
        options=ScheduleOptions(activation_offload=FULL),
    )
    with pytest.raises(InvalidSchedule, match=why):
        prove(schedule, problem)


def test_a_problem_that_does_not_offload_has_no_copies() -> None:
    program = built("gis", problem_of("gis", 2, 0.1, FULL))
    with pytest.raises(InvalidSchedule, match=r"belongs to offload, which is not requested"):
        prove(program.schedule, program.problem.with_options(activation_offload=NONE))


def test_copies_drawn() -> None:
    """Copies are as drawn on the page, with p = 1, m = 4 and forward passes first.

    While 0F1 runs, the activations of 0F0 are copied to the host and then freed. Two microbatches
    are offloaded, and each is copied back during the pass before its backward pass.
    """
    placement = line(1)
    rows = ("0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0",)
    schedule = Schedule(
        "drawn", placement, tuple(tuple(map(parse_action, r.split())) for r in rows)
    )
    costs = parse_costs("f=1,i=1,w=0,d2h=1,h2d=1", placement)
    made = offload(
        schedule, Problem(placement, 4, costs, options=ScheduleOptions(activation_offload=FULL))
    )
    assert " ".join(map(str, made.rows[0])) == (
        "0F0 0OFFLOAD_F0 0F1 0OFFLOAD_F1 0FREE_F0 0F2 0FREE_F1 0F3 0B3 "
        "0RELOAD_F1 0B2 0RELOAD_F0 0B1 0B0"
    )
    assert peaks(made, in_microbatches(made)) == [2]


# --- memory and time (Wan et al. 2025, section 4)


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "k"),
    [
        *in_pairs(["gis", "gis-h"], [4, 5, 6, *at_night(8, 16)], [2, 4], [0.8]),
        ("gis", 5, 2, 1.0),
        ("gis-h", 8, 4, 1.0),
    ],
)
def test_three_chunks_are_enough(name: str, ranks: int, chunks: int, k: float) -> None:
    """With offload, memory for three chunks is enough, however many ranks and chunks there are: one
    that a pass works on, one that is being copied, and one whose W comes soon."""
    spec = f"{name}:vpp={chunks}"
    program = all_copied(spec, ranks, k)
    assert chunks_held(program) <= 3
    assert makespan(program) == pytest.approx(makespan(without_copies(spec, ranks, k)))


def test_half_of_the_chunks_leave_about_half() -> None:
    whole = chunks_held(without_copies("gis:vpp=4", 8, 0.8))
    for name, share in (("gis:vpp=4", 0.5), ("gis-h:vpp=4", 0.35)):
        program = built(name, problem_of(name, 8, 0.8, HALF))
        assert chunks_held(program) <= share * whole
        assert makespan(program) == pytest.approx(makespan(without_copies(name, 8, 0.8)))


@pytest.mark.search
@pytest.mark.parametrize("spec", ALL)
def test_every_schedule_holds_less_in_the_same_time(spec: str) -> None:
    for ranks in (4, 5):
        without = built(spec, problem_of(spec, ranks, 0.8, microbatches=3 * ranks))
        held = [chunks_held(without)]
        for how in (HALF, FULL):
            program = built(spec, problem_of(spec, ranks, 0.8, how, microbatches=3 * ranks))
            held.append(chunks_held(program))
            assert makespan(program) == pytest.approx(makespan(without))
        assert held[0] >= held[1] >= held[2]
        assert held[2] <= (2 if spec == "1f1b" else 3)


@pytest.mark.parametrize("spec", ["gis:vpp=2", "zb-v", "1f1b"])
def test_slower_links_keep_more_here_and_cost_no_time(spec: str) -> None:
    without = without_copies(spec, 5, 1.0)
    held = []
    for k in (0.5, 1.0, 1.5, 2.0, 8.0, 200.0):
        program = all_copied(spec, 5, k)
        assert makespan(program) == pytest.approx(makespan(without))
        held.append(chunks_held(program))
    assert held[0] == held[1] < held[2]
    assert held[-1] == chunks_held(without), "a copy that takes longer than the step helps nobody"
    assert not copies(program)


def test_few_microbatches() -> None:
    for spec in ALL:
        if spec in ("interleaved", "v-auto"):
            continue  # interleaved needs groups of p, and v-auto searches for long
        for microbatches in (1, 2, 3):
            program = built(spec, problem_of(spec, 3, 0.5, FULL, microbatches=microbatches))
            assert chunks_held(program) <= 3


@pytest.mark.parametrize("limit", ["4", "2", "1.5"])
def test_fit_takes_the_fewest_that_fit(limit: str) -> None:
    problem = problem_of("gis:vpp=2", 8, 0.8, FIT, limit=limit)
    program = built("gis:vpp=2", problem)
    assert chunks_held(program) == 2 * float(limit)
    full = all_copied("gis:vpp=2", 8, 0.8)
    if limit != "1.5":
        assert len(copies(program)) < len(copies(full))
    assert makespan(program) == pytest.approx(makespan(full))


def test_fit_with_a_slow_link_takes_time() -> None:
    """Offload with ``fit`` works over a slow link but takes time: passes wait for copies, which the
    makespan counts."""
    without = makespan(built("1f1b", problem_of("1f1b", 4, 4)))
    program = built("1f1b", problem_of("1f1b", 4, 4, FIT, limit="2"))
    assert chunks_held(program) <= 2
    assert 1.1 * without < makespan(program) < 3 * without


def test_fit_counts_bytes() -> None:
    placement = choose("1f1b").place(4)
    held = {Held.ACTIVATION: (100.0,) * 4, Held.WEIGHT_INPUTS: (60.0,) * 4}
    costs = parse_costs("f=1,i=1,w=1", placement).with_passes(held_bytes=held)
    costs = costs.with_host((0.3,) * 4, (0.3,) * 4)
    problem = Problem(
        placement,
        16,
        costs,
        MemoryLimit(bytes=250),
        options=ScheduleOptions(activation_offload=FIT),
    )
    program = built("1f1b", problem)
    assert max(peaks(program.schedule, in_bytes(costs))) == 200


def test_what_does_not_fit_says_how_much_does() -> None:
    with pytest.raises(InvalidSchedule, match=r"least feasible limit for it is 1\.5 microbatches"):
        built("gis:vpp=2", problem_of("gis:vpp=2", 4, 0.8, FIT, limit="1"))


def test_a_copy_back_can_be_what_does_not_fit() -> None:
    """If a copy back from the host does not fit, the error names it. Only passes used to be
    searched for the cause, and none was found."""
    placement = line(1)
    text = "0F0 0OFFLOAD_F0 0FREE_F0 0F1 0RELOAD_F0 0B1 0B0"
    problem = Problem(
        placement,
        2,
        parse_costs("f=1,i=1,w=1,d2h=1", placement),
        MemoryLimit(microbatches=1),
        options=ScheduleOptions(activation_offload=FULL),
    )
    with pytest.raises(InvalidSchedule, match="0RELOAD_F0 brings rank 0 over the memory limit"):
        prove(Schedule("tight", placement, rows_of(text)), problem)


def test_a_family_that_knows_no_limit_is_built_without_one() -> None:
    """With offload, a family that knows no limit is built without one, as the limit is for
    activations that stay on the rank. The schedule gis without offload needs 8 microbatches, and
    this must not be refused."""
    program = built("gis:vpp=2", problem_of("gis:vpp=2", 8, 0.8, FULL, limit="2"))
    assert chunks_held(program) <= 4


# --- shared links


@pytest.mark.parametrize("more", [",link=2", ",duplex=0", ",link=3"])
@pytest.mark.parametrize("k", [0.2, 1.0])
def test_those_that_share_a_link_take_turns(more: str, k: float) -> None:
    """Ranks that share a link to the host take turns. A rank's copies used to start before its
    turn, which made a step 1.24 times as long."""
    program = built("gis:vpp=2", problem_of("gis:vpp=2", 6, k, FULL, more=more))
    host = program.problem.costs.host
    assert host is not None
    links: dict[object, list[Event]] = {}
    for event in copies(program):
        link = host.link(event.rank, RULES[event.action.kind].lane)
        links.setdefault(link, []).append(event)
    assert links
    for events in links.values():
        events.sort(key=lambda event: event.start)
        for earlier, later in itertools.pairwise(events):
            assert earlier.end <= later.start + 1e-9
    without = makespan(without_copies("gis:vpp=2", 6, k))
    assert makespan(program) <= 1.01 * without


def test_who_shares_a_link() -> None:
    host = HostCosts({}, ranks_per_link=2)
    ends = [host.link(rank, Lane.TO_HOST) for rank in range(3)]
    assert ends == [(0, Lane.TO_HOST), (0, Lane.TO_HOST), (1, Lane.TO_HOST)]
    assert HostCosts({}, duplex=False).link(1, Lane.TO_HOST) == (1, None)


# --- the host


def test_buffers_on_the_host() -> None:
    program = built("gis:vpp=2", problem_of("gis:vpp=2", 4, 0.5, FULL))
    for rank, row in enumerate(program.schedule.rows):
        most = most_on_host(row)
        out = [a for a in row if a.kind is Kind.OFFLOAD_F and a.stage == rank]
        assert 1 <= most[rank, Held.ACTIVATION] <= len(out)
    text = "0F0 0OFFLOAD_F0 0FREE_F0 0F1 0OFFLOAD_F1 0FREE_F1 0RELOAD_F1 0I1 0RELOAD_F0 0I0 0W0 0W1"
    assert most_on_host(rows_of(text)[0]) == {(0, Held.ACTIVATION): 2}


# --- with other options


def test_evaluation_has_no_copies() -> None:
    problem = replace(problem_of("gis", 4, 0.5, FULL), forward_only=True)
    assert not copies(built("gis", problem))


def test_batched_messages() -> None:
    problem = problem_of("zb-v", 4, 0.8, FULL)
    program = built("zb-v", problem.with_options(p2p=P2P.BATCHED))
    assert chunks_held(program) <= 3
    assert copies(program)


def test_a_divided_vocabulary() -> None:
    problem = problem_of("zb-v", 4, 0.4, FULL, more=",output_layer=0.5/0.5/0.5")
    program = built("zb-v", problem.with_options(vocab_parallel=VocabularyParallel.TWO))
    assert chunks_held(program) <= 4
    assert makespan(program) <= 1.01 * makespan(
        built(
            "zb-v",
            problem.with_options(vocab_parallel=VocabularyParallel.TWO, activation_offload=NONE),
        )
    )


# --- the costs


def test_logits_that_do_not_leave_are_not_copied() -> None:
    """With a split vocabulary the last stage holds no more memory than other stages, so its copies
    take no longer than theirs. If the output layer's weight gradient is computed in I, the inputs
    of W on the last stage take no longer to copy either."""
    placement = line(2)
    held = {Held.ACTIVATION: (100.0, 100.0), Held.WEIGHT_INPUTS: (50.0, 50.0)}
    layers = parse_costs("f=1,i=1,w=1", placement).with_passes(held_bytes=held)
    costs = layers.with_vocabulary(VocabularyCosts((1, 1, 1), logits_bytes=300.0))
    costs = costs.with_host((1.0, 4.0), (2.0, 8.0), 2, False)
    shared = share_vocabulary(costs, placement, VocabularyParallel.TWO).host
    assert shared is not None
    assert shared.seconds[Kind.OFFLOAD_F] == (1.0, 1.0)
    assert shared.seconds[Kind.RELOAD_I] == (1.0, 1.0)
    assert (shared.ranks_per_link, shared.duplex) == (2, False)
    program = place_output_layer(choose("zb-h1"), Problem(placement, 4, costs))
    assert not output_layer_waits(program)
    host = costs_in(program, costs).host
    assert host is not None
    assert host.seconds[Kind.OFFLOAD_F] == (1.0, 4.0)
    assert host.seconds[Kind.OFFLOAD_I] == (0.5, 0.5)


def test_costs_of_copies_are_read_and_printed() -> None:
    placement = v(2)
    costs = parse_costs("f=1,i=1,w=1,comm=0,d2h=2,h2d=4,link=2,duplex=0", placement)
    host = costs.host
    assert host is not None
    assert host.seconds[Kind.OFFLOAD_F] == (1.0,) * 4
    assert host.seconds[Kind.RELOAD_I] == (2.0,) * 4
    assert (host.ranks_per_link, host.duplex) == (2, False)
    assert parse_costs(format_costs(costs), placement) == costs
    assert parse_costs("f=1,i=1,w=1,d2h=2", placement) == parse_costs(
        "f=1,i=1,w=1,d2h=2,h2d=2,link=1,duplex=1", placement
    )


def test_what_w_needs_takes_as_long_as_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    given = {"activation": 100, "weight inputs": 25}
    data = {"version": 2, "f": 1, "i": 1, "w": 1, "d2h": 8, "h2d": 4, "link": 2, "bytes": given}
    file.write_text(json.dumps(data))
    host = parse_costs(str(file), line(2)).host
    assert host is not None
    assert host.seconds[Kind.OFFLOAD_I] == (2.0, 2.0)
    assert host.seconds[Kind.RELOAD_I] == (1.0, 1.0)
    assert host.ranks_per_link == 2


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("h2d=1", "h2d= needs d2h="),
        ("link=2", "link= needs d2h="),
        ("d2h=1,link=0", "link is 1 to 1,000,000 ranks"),
        ("d2h=1,link=1.5", "link is 1 to 1,000,000 ranks"),
        ("d2h=1,duplex=2", "duplex is 0 or 1"),
        ("d2h=1/2/3", "3 figures for 2 stages"),
        ("d2h=-1", "a cost is a number from 0"),
    ],
)
def test_costs_of_copies_that_are_wrong(more: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_costs(f"f=1,i=1,w=1,{more}", line(2))


def test_what_is_missing_is_named() -> None:
    placement = line(2)
    costs = parse_costs("f=1,i=1,w=1", placement)
    with pytest.raises(ValueError, match="add d2h= and h2d="):
        Problem(placement, 4, costs, options=ScheduleOptions(activation_offload=FULL))
    with pytest.raises(ValueError, match="as a memory limit requires, and there is none"):
        problem_of("1f1b", 2, 1, FIT)
    with pytest.raises(ValueError, match="no lower bound for schedules with offload full"):
        certify(built("1f1b", problem_of("1f1b", 2, 1, FULL)), 1)


def simulated(*words: str) -> dict[str, object]:
    costs = "f=1,i=1,w=1,d2h=0.8"
    given = ["simulate", "gis:vpp=2", "--pp", "4", "-m", "16", "--costs", costs, *words, "--json"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    report: dict[str, object] = json.loads(result.stdout)
    return report


def test_the_command(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    without, full = simulated(), simulated("--activation-offload", "full", "--perfetto", str(trace))
    assert (without["activation_offload"], full["activation_offload"]) == ("none", "full")
    assert full["makespan"] == without["makespan"]
    assert without["host_microbatches"] == [0, 0, 0, 0]
    assert full["peak_activation_microbatches"] == [1.5] * 4
    tracks = {event["args"].get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"copy to the host", "copy from the host"} <= tracks
