"""Tests of activations that are freed after F and recomputed: their order, memory and time."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile import recompute as compile_recompute
from megatron_ext.compile.build import build_program, caching_proofs, complete
from megatron_ext.compile.program.memory import (
    in_bytes,
    in_microbatches,
    memory_curve,
    peaks,
    recomputed_share,
)
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import InvalidSchedule, Program, prove
from megatron_ext.compile.registry import choose
from megatron_ext.compile.transforms.recompute import recompute
from megatron_ext.config import PipelineConfig
from megatron_ext.observe.program_summary import summarize
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs, LinkCosts, PassCosts, uniform
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit, parse_limit
from megatron_ext.schedule.placement import line, v
from megatron_ext.schedule.problem import (
    Offload,
    Problem,
    Recompute,
    ScheduleOptions,
    VocabularyParallel,
    parse_recompute,
)
from megatron_ext.schedule.schedule import bitwise_order
from megatron_ext.schedule.schedule_csv import from_csv, to_csv
from tests.helpers.random_schedules import PROPERTY, random_case, seeds
from tests.helpers.schedules import rows_of, with_messages, written

NONE, FIT, FIRST_1 = Recompute(), Recompute(fit=True), Recompute(first=1)

BY_HAND = """
0F0 0F1 0R0 0I0 0W0 0R1 0I1 0W1
1F0 1I0 1W0 1F1 1I1 1W1
"""


def problem_by_hand(limit: float | None = None, recompute: Recompute = NONE) -> Problem:
    placement = line(2)
    allowed = None if limit is None else MemoryLimit(microbatches=limit)
    costs = uniform(placement, 1, 1, 1)
    return Problem(placement, 2, costs, allowed, options=ScheduleOptions(recompute=recompute))


def proved_by_hand(text: str, problem: Problem) -> Program:
    schedule = written(text, problem.placement.rank_of)
    return prove(with_messages(schedule, problem), problem)


def makespan(program: Program) -> float:
    return simulate(program, program.problem.costs).makespan


# --- the kind R


def test_a_schedule_by_hand() -> None:
    """A schedule with recompute has the times and memory computed by hand: after F a tenth of the
    activations stays in memory, R allocates the rest when it starts, and R runs while the rank
    waits for a gradient."""
    program = proved_by_hand(BY_HAND, problem_by_hand(limit=1.1))
    row = program.schedule.rows[0]
    held = memory_curve(row, in_microbatches(program.schedule))
    assert held == pytest.approx([0.1, 0.2, 1.1, 1.1, 1.1, 1.0, 1.0, 1.0])
    starts = {str(event.action): event.start for event in simulate(program, UNIT).events}
    assert (starts["0F1"], starts["0R0"], starts["0I0"]) == (1, 2, 3)
    assert bitwise_order(program.schedule)


UNIT = uniform(line(2), 1, 1, 1)


@pytest.mark.parametrize(
    ("there", "damaged", "names"),
    [
        ("0R0 0I0", "0I0", "0R0 is missing on rank 0: nothing does the recomputation"),
        ("0F0 0F1 0R0", "0R0 0F0 0F1", "0R0 comes before 0F0, which it needs"),
        ("0R0 0I0", "0I0 0R0", "0I0 comes before 0R0, which it needs"),
        ("0R0 0I0", "0R0 0R0 0I0", "0R0 does the recomputation a second time"),
        ("1F0", "0R0 1F0", "0R0 is on rank 1; stage 0 is on rank 0"),
    ],
    ids=["missing", "before F", "after I", "twice", "elsewhere"],
)
def test_what_is_wrong_with_r_is_named(there: str, damaged: str, names: str) -> None:
    problem = problem_by_hand(recompute=FIRST_1)
    proved_by_hand(BY_HAND, problem)
    with pytest.raises(InvalidSchedule, match=names):
        proved_by_hand(BY_HAND.replace(there, damaged, 1), problem)


def test_without_one_r_there_is_no_room() -> None:
    """Under a memory limit, a schedule may choose the activations to recompute. With one R too few
    it is refused for its memory."""
    problem = problem_by_hand(limit=1.1, recompute=FIT)
    with pytest.raises(InvalidSchedule, match="0R0 brings rank 0 over the memory limit"):
        proved_by_hand(BY_HAND.replace("0R1 ", ""), problem)


def test_r_has_no_place_in_an_evaluation() -> None:
    problem = replace(problem_by_hand(), forward_only=True)
    with pytest.raises(InvalidSchedule, match="0R0 has no place in an evaluation"):
        proved_by_hand("0F0 0F1 0R0\n1F0 1F1", problem)
    program = complete(written(BY_HAND, (0, 1)), problem)
    assert program.schedule.compute_rows == rows_of("0F0 0F1\n1F0 1F1")


def test_in_bytes_the_input_is_what_comes_from_the_stage_before() -> None:
    costs = Costs(
        PassCosts(
            dict.fromkeys((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), (1.0, 1.0)),
            held_bytes={Held.ACTIVATION: (100.0, 100.0), Held.WEIGHT_INPUTS: (50.0, 50.0)},
        ),
        LinkCosts(message_bytes=7.0),
    )
    amount = in_bytes(costs)
    # The inputs of the first stage are tokens, whose bytes are not counted.
    assert [amount(Held.INPUT, stage) for stage in (0, 1)] == [0.0, 7.0]
    amount = in_bytes(costs.with_links(message_bytes=0.0))
    assert amount(Held.INPUT, 1) == 10.0
    rows = rows_of("1F0 1F1 1R0 1I0 1W0 1R1 1I1 1W1")
    held = memory_curve(rows[0], in_bytes(costs))
    assert held == [7, 14, 107, 107, 57, 100, 100, 50]


def test_a_table_with_r() -> None:
    schedule = written(BY_HAND, (0, 1))
    again = from_csv(to_csv(schedule), "file")
    assert again.rows == schedule.rows
    program = complete(again, problem_by_hand())
    assert recomputed_share(program.schedule) == 0.5
    assert "50% of the activations are recomputed" in summarize(program)


def test_a_table_with_r_needs_no_flag(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(to_csv(written(BY_HAND, (0, 1))))
    assert choose(str(path)).recomputes
    assert not choose("zb-h1").recomputes


# --- the setting


def test_texts() -> None:
    for text in ("none", "fit", "first:2"):
        assert str(parse_recompute(text)) == text
    for text in ("first", "first:0", "first:x", "all", ""):
        with pytest.raises(ValueError, match=r"write none, fit .* or first:N"):
            parse_recompute(text)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"recompute": FIT}, "recompute fit recomputes as much.* or write first:2 for all"),
        (
            {"recompute": Recompute(first=3)},
            "the pipeline has only 2 stages; write first:2 for all",
        ),
        (
            {"recompute": FIRST_1, "activation_offload": Offload.FULL},
            "offload full does not go with recomp",
        ),
    ],
)
def test_refusals(problem: dict[str, object], message: str) -> None:
    costs = parse_costs("f=1,i=1,w=1,d2h=1", line(2))
    with pytest.raises(ValueError, match=message):
        Problem(line(2), 4, costs).with_options(**problem)


# --- the transform


@settings(PROPERTY, max_examples=35)
@given(seeds)
def test_any_schedule_takes_them(seed: int) -> None:
    """Recompute works with any schedule: its passes stay in their order, each R comes between its F
    and its I, `prove` accepts the program, and no rank holds more than before."""
    case = random_case(seed)
    stages = case.problem.placement.stages
    problem = case.problem.with_options(recompute=Recompute(first=Random(seed).randint(1, stages)))
    made = recompute(case.schedule, problem)
    passes = [tuple(a for a in row if a.kind is not Kind.RECOMPUTE) for row in made.rows]
    assert tuple(passes) == case.schedule.rows
    program = prove(with_messages(made, problem), problem)
    for amount in (in_microbatches(made), in_bytes(problem.costs)):
        for now, before in zip(
            peaks(program.schedule, amount), peaks(case.schedule, amount), strict=True
        ):
            assert now <= before * (1 + 1e-9)


def held_by_hand(row: tuple[Action, ...], share: float) -> list[float]:
    """Return the microbatches that a rank holds during each pass, counted one activation at a
    time."""
    again = {(a.stage, a.microbatch) for a in row if a.kind is Kind.RECOMPUTE}
    whole: set[tuple[int, int]] = set()
    inputs: set[tuple[int, int]] = set()
    held = []
    for stage, kind, k in row:
        if kind is Kind.FORWARD:
            (inputs if (stage, k) in again else whole).add((stage, k))
        elif kind is Kind.RECOMPUTE:
            inputs.remove((stage, k))
            whole.add((stage, k))
        held.append(share * (len(whole) + 0.1 * len(inputs)))
        if kind in (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD):
            whole.remove((stage, k))
    return held


def others_and_w(row: tuple[Action, ...]) -> tuple[list[Action], dict[Action, int]]:
    """Return all passes but W and R in their order, and for each W the number of these passes
    before it."""
    others: list[Action] = []
    before = {}
    for action in row:
        if action.kind is Kind.BACKWARD_WEIGHT:
            before[action] = len(others)
        elif action.kind is not Kind.RECOMPUTE:
            others.append(action)
    return others, before


@settings(PROPERTY, max_examples=60)
@given(seeds)
def test_what_fits_is_within_the_limit(seed: int) -> None:
    """Recompute keeps the order of F, I and B, and moves no W later. The memory is the one counted
    by hand. If a schedule with recompute is over the limit, it would be so even with all
    activations recomputed."""
    random, case = Random(seed), random_case(seed)
    limit = MemoryLimit(microbatches=random.choice([1.0, 1.5, 2.0, 3.0]))
    problem = replace(case.problem, memory_limit=limit).with_options(recompute=FIT)
    made = recompute(case.schedule, problem)
    for row, before in zip(made.rows, case.schedule.rows, strict=True):
        now, w_now = others_and_w(row)
        then, w_then = others_and_w(before)
        assert now == then
        assert all(w_now[w] <= w_then[w] for w in w_then)
    amount, share = in_microbatches(made), 1 / made.placement.chunks
    for row in made.rows:
        assert memory_curve(row, amount) == pytest.approx(held_by_hand(row, share))
    assert limit.microbatches is not None
    fits = max(peaks(made, amount)) <= limit.microbatches * (1 + 1e-9)
    if fits:
        prove(with_messages(made, problem), problem)
    else:
        with pytest.raises(InvalidSchedule, match="over the memory limit"):
            prove(with_messages(made, problem), problem)
        full = problem.with_options(recompute=Recompute(first=made.placement.stages))
        most = recompute(case.schedule, full)
        assert max(peaks(most, amount)) > limit.microbatches


@pytest.mark.parametrize(
    ("spec", "limit", "makespan_"),
    [
        ("1f1b", 4, 1404),
        ("zb-v", 4, 1242),
        ("v-half", 3, 1280),
        ("zb-v", 2, 1361),
        ("interleaved:vpp=2", 4, 1261),
    ],
)
def test_a_schedule_takes_less_memory_than_its_order_needs(
    spec: str, limit: float, makespan_: float
) -> None:
    """With recompute, a schedule fits into less memory than its order needs. On 8 ranks with 32
    microbatches and without recompute, 1f1b needs memory for 8 microbatches (makespan 1238 time
    units), zb-v for 8 (makespan 1035), and interleaved for 11.5 (makespan 1095)."""
    placement = choose(spec).place(8)
    costs = parse_costs("f=10,i=12,w=8,comm=1", placement)
    problem = Problem(
        placement,
        32,
        costs,
        MemoryLimit(microbatches=limit),
        options=ScheduleOptions(recompute=FIT),
    )
    program = build_program(choose(spec), problem)
    assert max(peaks(program.schedule, in_microbatches(program.schedule))) <= limit * (1 + 1e-9)
    assert makespan(program) <= makespan_


def test_with_a_divided_vocabulary() -> None:
    """With a split vocabulary, a schedule holds more microbatches, and recompute makes it fit into
    the limit. An evaluation recomputes nothing."""
    placement = v(4)
    costs = parse_costs("f=10,i=12,w=8,comm=1,output_layer=6/6/6,embedding=1/1", placement)
    problem = Problem(
        placement,
        12,
        costs,
        MemoryLimit(microbatches=3),
        options=ScheduleOptions(recompute=FIT, vocab_parallel=VocabularyParallel.TWO),
    )
    program = build_program(choose("v-half"), problem)
    assert recomputed_share(program.schedule) > 0
    evaluation = build_program(choose("v-half"), replace(problem, forward_only=True))
    assert recomputed_share(evaluation.schedule) == 0


def test_in_bytes_messages_count() -> None:
    placement = v(4)
    costs = (
        parse_costs("f=10,i=12,w=8,comm=1", placement)
        .with_passes(held_bytes={Held.ACTIVATION: (100.0,) * 8, Held.WEIGHT_INPUTS: (60.0,) * 8})
        .with_links(message_bytes=8.0)
    )
    for limit in (330, 400, 500):
        problem = Problem(
            placement, 12, costs, MemoryLimit(bytes=limit), options=ScheduleOptions(recompute=FIT)
        )
        program = build_program(choose("zb-v"), problem)
        assert 0.6 * limit < max(peaks(program.schedule, in_bytes(costs))) <= limit


@pytest.mark.parametrize("spec", ["1f1b", "zb-h1", "zb-v"])
def test_stages_with_nothing_to_train_recompute_nothing(spec: str) -> None:
    problem = replace(problem_of_v_or_line(spec), first_trained_stage=2)
    program = build_program(choose(spec), problem)
    again = {a.stage for row in program.schedule.rows for a in row if a.kind is Kind.RECOMPUTE}
    assert again == {2}


def problem_of_v_or_line(spec: str) -> Problem:
    placement = choose(spec).place(4)
    costs = parse_costs("f=10,i=12,w=8,comm=1", placement)
    return Problem(placement, 8, costs, options=ScheduleOptions(recompute=Recompute(first=3)))


_WITH_BYTES = (
    '{"version": 2, "f": 1, "i": 1, "w": 1, "comm": 0.1, "bytes": {"activation": 20000000, '
    '"weight inputs": 8000000, "logits": 5000000, "message": 2000000}}'
)


@pytest.mark.parametrize(
    ("spec", "wanted", "costs"),
    [
        ("interleaved-zb", FIT, "f=1,i=1,w=1"),
        ("interleaved-zb", FIT, _WITH_BYTES),
        ("interleaved-zb", FIRST_1, _WITH_BYTES),
        ("zb-h1", FIT, _WITH_BYTES),
    ],
)
def test_a_limit_that_a_refusal_names_is_enough_and_little_less_is_not(
    spec: str, wanted: Recompute, costs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory limit that a refusal names is enough, and a little less is not.

    A refusal used to name 104.9 MiB although 40.1 MiB were enough: it took the last reason, which
    came from the family, and families do not consider recompute. Another named 59.1 MiB although
    55.3 MiB were enough.
    """
    if costs == _WITH_BYTES:
        (tmp_path / "costs.json").write_text(costs)
        costs = str(tmp_path / "costs.json")
    resolved = choose(spec)
    placement = resolved.place(2)
    known = parse_costs(costs, placement)

    def within(limit: str) -> Program:
        allowed = parse_limit(limit, 2, 4)
        problem = Problem(placement, 4, known, allowed, options=ScheduleOptions(recompute=wanted))
        return build_program(resolved, problem)

    with pytest.raises(InvalidSchedule, match="over the memory limit") as refusal:
        within("1MiB" if known.held_bytes else "0.1")
    named = re.findall(r"([\d.]+)(MiB)?(?: microbatches)?(?: is enough|: give)", str(refusal.value))
    number, unit = named[0]
    within(number + unit)

    def look(*given: object) -> float:
        raise AssertionError(
            "a refusal must not search for a memory limit while many schedules are compared"
        )

    monkeypatch.setattr(compile_recompute, "_least_that_is_enough", look)
    for share in (0.6, 0.8, 0.9, 0.95):
        with caching_proofs(), pytest.raises(ValueError, match="memory limit"):
            within(f"{float(number) * share:.3f}{unit}")


@pytest.mark.parametrize("spec", ["v-auto", "loop-auto", "wave-auto"])
def test_an_evaluation_recomputes_nothing(spec: str) -> None:
    """An evaluation recomputes nothing.

    Families that choose the activations to recompute get no limit in an evaluation. They used to
    say that recompute had no limit to fit into, which ended the training.
    """
    resolved = choose(spec).without_search
    placement = resolved.place(2)
    problem = Problem(
        placement,
        4,
        uniform(placement, 1.0, 1.0, 1.0),
        parse_limit("1.5", 2, 4),
        forward_only=True,
        options=ScheduleOptions(recompute=FIT),
    )
    rows = build_program(resolved, problem).schedule.compute_rows
    assert {action.kind for row in rows for action in row} == {Kind.FORWARD}


def test_simulate_says_what_is_recomputed(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    words = ["simulate", "zb-v", "--pp", "4", "-m", "8", "--costs", "f=10,i=12,w=8,comm=1"]
    words += ["--recompute", "first:4", "--csv", str(table)]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "recomputed" in shown.output and "50% of the activations" in shown.output
    figures = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (figures["recompute"], figures["recomputed"]) == ("first:4", 0.5)
    words = ["simulate", str(table), "--pp", "4", "-m", "8", "--costs", "f=10,i=12,w=8,comm=1"]
    again = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (again["recompute"], again["recomputed"]) == ("none", 0.5)
    assert again["makespan"] == figures["makespan"]


def test_a_setting_needs_something_to_fit_into() -> None:
    with pytest.raises(ValueError, match="--pipeline-recompute fit recomputes as much as"):
        PipelineConfig.parse(schedule="zb-v", recompute="fit")
    with pytest.raises(ValueError, match="--pipeline-recompute all: write none, fit"):
        PipelineConfig.parse(schedule="zb-v", recompute="all")
    config = PipelineConfig.parse(schedule="zb-v", recompute="first:4")
    assert config.recomputes and not PipelineConfig.parse(schedule="zb-v").recomputes
