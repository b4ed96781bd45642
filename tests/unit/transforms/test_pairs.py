"""Tests of overlapped passes (pairs of a forward and a backward pass): rows, proof, memory, costs,
the choice of passes, text and pictures.

In tables a column is a unit of time, ``.`` is idle, and ``=`` continues a pass; ``3F1+3I0`` are
overlapped passes.
"""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.build import build_program, complete
from megatron_ext.compile.program.graph import Device
from megatron_ext.compile.program.memory import in_microbatches, memory_curve, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import InvalidSchedule, Program, prove
from megatron_ext.compile.registry import choose, entries
from megatron_ext.config import OVERLAP
from megatron_ext.observe.trace import TraceFile, read_trace, traced_step
from megatron_ext.planner import fitting
from megatron_ext.planner.candidate import Variant, VocabMethod
from megatron_ext.planner.figures import flags_of
from megatron_ext.planner.planner import make_plan
from megatron_ext.planner.training import Training
from megatron_ext.schedule.action import (
    Action,
    Kind,
    OverlappedPasses,
    parse_action,
    parse_overlapped,
)
from megatron_ext.schedule.costs import Costs, OverlapCosts
from megatron_ext.schedule.costs_text import format_costs, load_costs, parse_costs, save_costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import v
from megatron_ext.schedule.problem import (
    P2P,
    Offload,
    Problem,
    Recompute,
    ScheduleOptions,
    VocabularyParallel,
)
from megatron_ext.schedule.schedule import Schedule, bitwise_order, is_compute
from megatron_ext.schedule.schedule_csv import from_csv, to_csv, to_torch_csv
from megatron_ext.schedule.slices import Slices
from megatron_ext.viz.draw import draw
from megatron_ext.viz.page.run import of_passes, simulated_run
from tests.helpers.combinations import at_night, nightly
from tests.helpers.pages import data_in
from tests.helpers.schedules import drawn, rows_of, table, with_messages

KEEPING = [
    name
    for name, entry in entries().items()
    if entry.traits.keeps_pairs and not entry.traits.searches
]
COSTS = "f=10,i=12,w=8,comm=0.2,overlap_saving=4"
ALIKE = "f=2,i=2,w=2,overlap_saving=2"

# Two ranks of a V placement: stages 1 and 2 on rank 0, stages 0 and 3 on rank 1.
V = v(2)
BY_HAND = """
1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
0F0 0F1 3F0 3F1 3I0 3I1 0I0 0I1 3W0 3W1 0W0 0W1
"""


def problem_for(
    spec: str, p: int, m: int, costs: str = COSTS, limit: float | None = None, **options: Any
) -> Problem:
    placement = choose(spec).place(p)
    allowed = None if limit is None else MemoryLimit(microbatches=limit)
    asked = ScheduleOptions(**{"pairs": True} | options)
    return Problem(placement, m, parse_costs(costs, placement), allowed, options=asked)


def built(spec: str, p: int, m: int, costs: str = COSTS, **asked: Any) -> Program:
    return build_program(choose(spec), problem_for(spec, p, m, costs, **asked))


def makespan(program: Program) -> float:
    return simulate(program, program.problem.costs).makespan


def by_hand(*pairs: str, text: str = BY_HAND, costs: str = ALIKE) -> Schedule:
    named = [pair for pair in map(parse_overlapped, pairs) if pair is not None]
    assert len(named) == len(pairs)
    return Schedule("by hand", V, rows_of(text), frozenset(named))


PROBLEM = Problem(V, 2, parse_costs(ALIKE, V), options=ScheduleOptions(pairs=True))
GOOD = "(3F1;3I0)OVERLAP_F_B"


def proved(schedule: Schedule, problem: Problem = PROBLEM) -> Program:
    return prove(with_messages(schedule, problem), problem)


# --- rows and the proof


def test_a_pair_by_hand() -> None:
    """Overlapped passes take the time computed by hand: F and I of a later microbatch take one unit
    together, as each does alone. Rank 0 gets the gradient when both passes have ended."""
    assert drawn(simulate(proved(by_hand(GOOD)), PROBLEM.costs)) == table("""
        0  . 1F0 2F0 1F1 2F1    .    2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1 .
        1  0F0 0F1 . 3F0 . 3F1+3I0 3I1 . 0I0 . 0I1 3W0 3W1 0W0 0W1
    """)


def test_messages_of_a_pair_stand_before_and_after_both() -> None:
    program = proved(by_hand(GOOD))
    row = ",".join(map(str, program.schedule.rows[1]))
    assert ",3F1,3I0,3SEND_B0," in row
    assert ",(3F1;3I0)OVERLAP_F_B,3SEND_B0," in program.text
    alone = proved(by_hand(), PROBLEM)
    assert program.digest != alone.digest
    assert alone.digest == proved(by_hand(), PROBLEM.with_options(pairs=False)).digest


def test_both_are_held_at_once() -> None:
    """Overlapped passes hold the memory of both at once. If the backward pass runs before F, the
    activation that it uses is freed before that of F is allocated. If they overlap, both are
    held."""
    first = "1F0 2F0 2I0 1F1 2F1 1I0 2I1 1I1 2W0 1W0 2W1 1W1"
    other = "0F0 3F0 3I0 0F1 3F1 3I1 0I0 0I1 3W0 3W1 0W0 0W1"
    whole = f"{first}\n{other}".replace("I", "B")
    rows = [" ".join(name for name in row.split() if "W" not in name) for row in whole.split("\n")]
    paired = "\n".join([rows[0].replace("2B0 1F1", "1F1 2B0"), rows[1]])
    amount = in_microbatches(by_hand())
    apart, together = by_hand(text="\n".join(rows)), by_hand("(1F1;2B0)OVERLAP_F_B", text=paired)
    assert memory_curve(apart.rows[0], amount) == [0.5, 1, 1, 1, 1.5, 1.5, 1, 0.5]
    assert memory_curve(together.rows[0], amount) == [0.5, 1, 1.5, 1.5, 1.5, 1.5, 1, 0.5]
    proved(together)
    limited = replace(PROBLEM, memory_limit=MemoryLimit(microbatches=1.5))
    assert peaks(proved(together, limited).schedule, amount)[0] == 1.5


# Refused overlaps by their reason: the overlapped passes, a text in the rows, the text that
# replaces it, and the error.
REFUSALS = {
    "its own": (
        ["(3F1;3I1)OVERLAP_F_B"], "3F1 3I0 3I1", "3I0 3F1 3I1", r"3I1 needs 3F1",
    ),
    "not beside": (
        ["(3F0;3I0)OVERLAP_F_B"], "", "", r"3I0 needs 3F0",
    ),
    "another between": (
        ["(3F1;3I1)OVERLAP_F_B"], "", "", r"3I1 needs 3F1",
    ),
    "W between": (
        ["(3F1;0I0)OVERLAP_F_B"], "", "", r"cannot run as one: 3I0 comes right after 3F1",
    ),
    "two pairs": (
        [GOOD, "(0F1;3I0)OVERLAP_F_B"], "", "", r"3I0 is in two pairs",
    ),
    "other rank": (
        ["(3F1;2I0)OVERLAP_F_B"], "", "", r"3I0 comes right after 3F1",
    ),
    # 2F1 and 2I0 cannot overlap: 2F1's output is sent after 2I0, which needs 3I0, which runs after
    # 3F1, which needs 2F1's output.
    "through another rank": (
        ["(2F1;2I0)OVERLAP_F_B"], "", "",
        r"it would hang: 2RECV_B0 waits for 3SEND_B0 waits for 3I0 waits for 3F1 waits for "
        r"3RECV_F1 waits for 2SEND_F1 waits for \(2F1;2I0\)OVERLAP_F_B waits for 2RECV_B0",
    ),
    "two that wait for one another": (
        [GOOD, "(2F1;2I0)OVERLAP_F_B"], "", "",
        r"it would hang: 2RECV_B0 waits for 3SEND_B0 waits for \(3F1;3I0\)OVERLAP_F_B waits for "
        r"3RECV_F1 waits for 2SEND_F1 waits for \(2F1;2I0\)OVERLAP_F_B waits for 2RECV_B0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("pairs", "there", "instead", "says"), REFUSALS.values(), ids=REFUSALS)
def test_what_is_no_pair_is_refused(pairs: list[str], there: str, instead: str, says: str) -> None:
    schedule = by_hand(*pairs, text=BY_HAND.replace(there, instead) if there else BY_HAND)
    with pytest.raises(InvalidSchedule, match=says):
        proved(schedule)
    if "hang" in says:
        proved(replace(schedule, pairs=frozenset()))


def test_kinds_that_are_no_pair() -> None:
    schedule = replace(
        by_hand(), pairs=frozenset({OverlappedPasses(parse_action("3I1"), parse_action("0I0"))})
    )
    with pytest.raises(InvalidSchedule, match="is no pair: a pair is F with I or B"):
        proved(schedule)


def test_pairs_that_are_not_requested_are_refused() -> None:
    alone = PROBLEM.with_options(pairs=False)
    with pytest.raises(InvalidSchedule, match=r"\(3F1;3I0\)OVERLAP_F_B, .* are not requested"):
        proved(by_hand(GOOD), alone)


@pytest.mark.parametrize("p2p", P2P)
@pytest.mark.parametrize(
    ("spec", "p"),
    [
        *((name, 2) for name in KEEPING),
        *at_night(*((name, 3) for name in (*KEEPING, "gis", "v-half", "1f1b-v", "hanayo"))),
    ],
)
def test_what_is_made_is_proved_and_times_are_those_of_pairs(spec: str, p: int, p2p: P2P) -> None:
    """Overlapped passes begin when both passes have their inputs, and their outputs are sent when
    both passes have ended.

    On a loop of two ranks, both neighbours of a rank are the same rank; messages used to overtake
    one another there.
    """
    program = built(spec, p, 2 * p + 2, p2p=p2p)
    schedule, costs = program.schedule, program.problem.costs
    assert schedule.pairs
    assert bitwise_order(schedule)
    # With batched messages the device with one queue is not simulated, as its timeline does not
    # show that messages swap in one batch.
    devices = list(Device)[: 2 if p2p is P2P.BATCHED else 3]
    for device in devices:
        timeline = simulate(program, costs, device)
        at = {event.action: event for event in timeline.events}
        for row in timeline.compute:
            assert all(e.end <= later.start + 1e-9 for e, later in pairwise(row))
        for pair in schedule.pairs:
            start, end = at[pair.forward].start, at[pair.backward].end
            assert end - start == pytest.approx(costs.of_overlapped(*pair))
            for action, there, kind in zip(pair, (1, -1), ("F", "I"), strict=True):
                stage, _, k = action
                follower = Action(stage + there, Kind(kind), k)
                whole = follower._replace(kind=Kind.FULL_BACKWARD)
                event = at.get(follower, at.get(whole))
                assert event is None or event.start >= end - 1e-9
                maker = Action(stage - there, Kind(kind), k)
                event = at.get(maker, at.get(maker._replace(kind=Kind.FULL_BACKWARD)))
                assert event is None or event.end <= start + 1e-9


# --- the passes that overlap


def test_interleaved_with_pairs_is_megatrons_combined_order() -> None:
    """interleaved with overlapped passes has Megatron's own combined order.

    With --overlap-moe-expert-parallel-comm, Megatron's warm-up is one forward pass longer. After it
    each forward pass overlaps with a backward pass (schedules.py).
    """
    p, m, chunks = 4, 8, 2
    schedule = built("interleaved", p, m).schedule
    groups = [range(start, start + p) for start in range(0, m, p)]
    for rank, row in enumerate(schedule.compute_rows):
        stages = [chunk * p + rank for chunk in range(chunks)]
        forwards = [Action(s, Kind.FORWARD, k) for ks in groups for s in stages for k in ks]
        backwards = [
            Action(s, Kind.FULL_BACKWARD, k) for ks in groups for s in stages[::-1] for k in ks
        ]
        warm_up = (p - rank - 1) * 2 + (chunks - 1) * p + 1
        together = list(zip(forwards[warm_up:], backwards, strict=False))
        left = backwards[len(together) :]
        assert row == (*forwards[:warm_up], *(a for pair in together for a in pair), *left)
        assert {pair for pair in schedule.pairs if pair.forward in row} == set(together)


def test_dualpipe_v_drawn() -> None:
    """The schedule dualpipe-v is as DualPipe's paper draws it: F of a chunk takes 2, B takes 4, and
    both overlapped take 5 instead of 6."""
    program = built("dualpipe-v", 2, 4, "f=4,i=4,w=4,overlap_saving=2")
    assert drawn(simulate(program, program.problem.costs)) == table("""
        0  .  .  1F0 = 2F0 = 1F1 = 2F1 = 1F2+2B0 = = = = 2F2+1B0 = = = = 1F3+2B1 = = = = \
2F3+1B1 = = = = 2B2 = = = 1B2 = = = . 2I3 = 1I3 = 2W3 = 1W3 =
        1  0F0 = 0F1 = 0F2 = 3F0 = 3I0 = 3W0 = 3F1 = 0F3+3B1 = = = = . 3F2+0B0 = = = = \
3B2 = = = . 3F3+0B1 = = = = 3B3 = = = 0I2 = 0W2 = 0I3 = 0W3 =
    """)


@pytest.mark.parametrize("spec", KEEPING)
def test_who_keeps_pairs_has_most_forward_passes_in_them(spec: str) -> None:
    """Schedules that overlap passes overlap most forward passes, here more than 70 % of them.
    Forward passes of the warm-up run alone."""
    program = built(spec, 4, 24)
    passes = 24 * program.problem.placement.stages
    assert len(program.schedule.pairs) > 0.7 * passes
    alone = built(spec, 4, 24, pairs=False)
    assert makespan(program) < 0.93 * makespan(alone)


@pytest.mark.parametrize("spec", ["1f1b", "zb-h1", "gpipe"])
def test_overlapped_passes_are_refused_on_a_line_which_names_a_v(spec: str) -> None:
    with pytest.raises(ValueError, match=f"schedule {spec} has one stage on each rank.*zb-v"):
        built(spec, 4, 8)


def test_where_no_two_can_be_one_it_is_said() -> None:
    with pytest.raises(ValueError, match="has no forward pass that could overlap a backward"):
        built("dualpipe-v", 4, 1)


def test_f_overlaps_with_b_if_that_saves_more_time() -> None:
    """A forward pass F overlaps with a whole backward pass B if that saves more time than
    overlapping with I alone. Otherwise F overlaps with I.

    In both cases here, overlapping F with I saves 1 time unit. Overlapping F with B saves 5 units
    in one case, where F then overlaps with B, and 1 unit in the other, where F overlaps with I.
    """
    kinds = {}
    for beside_b in (1.0, 5.0):
        problem = problem_for("zb-v", 4, 16)
        stages = range(problem.placement.stages)
        hidden = {
            kind: tuple(tuple(most for _ in stages) for _ in stages)
            for kind, most in ((Kind.BACKWARD_INPUT, 1.0), (Kind.FULL_BACKWARD, beside_b))
        }
        problem = replace(problem, costs=replace(problem.costs, overlap=OverlapCosts(hidden)))
        pairs = build_program(choose("zb-v"), problem).schedule.pairs
        kinds[beside_b] = {str(pair.backward.kind) for pair in pairs}
    assert kinds == {1.0: {"I"}, 5.0: {"B"}}


def test_pairs_keep_to_the_memory_limit() -> None:
    """Overlapped passes keep to the memory limit. They hold one chunk more than a forward pass
    after its backward pass, so with a tight limit fewer passes overlap."""
    free = built("interleaved", 4, 16)
    most = max(peaks(free.schedule, in_microbatches(free.schedule)))
    alone = built("interleaved", 4, 16, pairs=False)
    assert most == max(peaks(alone.schedule, in_microbatches(alone.schedule))) + 0.5
    within = built("interleaved", 4, 16, limit=most - 0.5)
    assert 0 < len(within.schedule.pairs) < len(free.schedule.pairs)


@nightly("test_pairs has what a search is compared with")
def test_v_auto_takes_what_gains_most_by_pairs() -> None:
    searched = makespan(built("v-auto", 4, 12))
    assert searched <= makespan(built("zb-v", 4, 12)) + 1e-9
    assert searched < 0.95 * makespan(built("v-auto", 4, 12, pairs=False))


def test_pairs_are_tried_where_passes_alone_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapped passes are tried if passes alone do not fit. A plan used to say that the schedule
    interleaved-zb needs too much memory for a recipe, although it fits with overlapped passes."""

    def refuse(*args: Any) -> None:
        raise ValueError("rank 4 would hold 47 GiB more than it may")

    monkeypatch.setattr(fitting, "_consider", refuse)
    variant = Variant(choose("zb-v"), problem_for("zb-v", 2, 6), None)
    assert fitting.consider(variant, VocabMethod.NAIVE).report.pairs > 0


def test_an_evaluation_has_none() -> None:
    problem = replace(problem_for("zb-v", 4, 8), forward_only=True)
    program = build_program(choose("zb-v"), problem)
    assert not program.schedule.pairs
    alone = build_program(choose("zb-v"), problem.with_options(pairs=False))
    assert program.digest == alone.digest


def test_stages_with_nothing_to_train_have_none() -> None:
    problem = replace(problem_for("dualpipe-v", 2, 6), first_trained_stage=2)
    pairs = build_program(choose("dualpipe-v"), problem).schedule.pairs
    assert pairs
    assert all(pair.backward.stage >= 2 for pair in pairs)


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_parallel": VocabularyParallel.TWO},
        {"recompute": Recompute(first=1)},
        {"activation_offload": Offload.HALF},
        {"steps_overlap": True},
        {"slices": Slices(2)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_does_not_go_with_pairs(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="pairing of passes does not go with"):
        problem_for("zb-v", 4, 8, f"{COSTS},d2h=1", **options)


# --- costs


def costs_of(text: str) -> Costs:
    return parse_costs(text, V)


def test_what_hides_in_a_pair() -> None:
    forward, backward = Action(1, Kind.FORWARD, 3), Action(2, Kind.BACKWARD_INPUT, 1)
    costs = costs_of("f=2/2/4/4,i=3/3/6/6,w=1,overlap_saving=0/1/2/9")
    assert costs.overlap_saving(forward, backward) == 1  # the smaller saving of the two stages
    assert costs.of_overlapped(forward, backward) == 2 + 6 - 1
    assert (
        costs.overlap_saving(forward._replace(stage=0), backward) == 0
    )  # dense layers have no communication to overlap
    last = forward._replace(stage=3), backward._replace(stage=3)
    assert costs.overlap_saving(*last) == 4  # at most the time of the shorter pass
    whole = backward._replace(kind=Kind.FULL_BACKWARD)
    assert costs.of_overlapped(forward, whole) == 2 + 6.5 - 1
    assert costs_of("f=2,i=2,w=2").of_overlapped(forward, backward) == 2


def test_costs_are_written_and_read(tmp_path: Path) -> None:
    text = "f=2/2/4/4,i=3/3/6/6,w=1/1/1/1,comm=0,overlap_saving=0/1/2/4"
    assert format_costs(costs_of(text)) == text
    save_costs(costs_of(text), tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json", V).overlap.savings == costs_of(text).overlap.savings
    table_of_b = {Kind.FULL_BACKWARD: tuple((0.5, 1.0, 1.5, 2.0) for _ in range(4))}
    save_costs(replace(costs_of(text), overlap=OverlapCosts(table_of_b)), tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json", V).overlap.savings == table_of_b


@pytest.mark.parametrize(
    ("saving", "says"),
    [
        ("overlap_saving=1/2", "2 figures for 4 stages"),
        ("overlap_saving=-1", "a cost is a number from 0"),
    ],
)
def test_wrong_savings_in_costs_are_refused(saving: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        costs_of(f"f=1,i=1,w=1,{saving}")


@pytest.mark.parametrize("value", [{"w": []}, {"i": [[1]]}, {"i": [[1, 1, 1, "x"]] * 4}, "x"])
def test_wrong_tables_of_savings_are_refused(value: object, tmp_path: Path) -> None:
    data = {"version": 2, "f": 1, "i": 1, "w": 1, "overlap_saving": value}
    (tmp_path / "costs.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="overlap_saving"):
        load_costs(tmp_path / "costs.json", V)


# --- text


@pytest.mark.parametrize("spec", KEEPING)
def test_tables_are_read_back(spec: str) -> None:
    program = built(spec, 4, 8)
    schedule = program.schedule
    read = from_csv(to_csv(schedule), "x.csv")
    assert read.rows == schedule.compute_rows
    assert read.pairs == schedule.pairs
    assert complete(read, program.problem).schedule.rows == schedule.rows
    assert complete(replace(read, pairs=frozenset()), program.problem).schedule.pairs
    theirs = from_csv(to_torch_csv(schedule), "x.csv")
    assert (theirs.rows, theirs.pairs) == (read.rows, read.pairs)


def test_torch_reads_a_pair() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = schedules._Action.from_str(GOOD)
    assert str(theirs) == GOOD
    forward, backward = theirs.sub_actions
    assert (forward.stage_index, forward.microbatch_index) == (3, 1)
    assert (str(backward), str(parse_action("3I0"))) == ("3I0", "3I0")


def test_a_table_with_pairs_runs_without_them_unless_they_are_requested(tmp_path: Path) -> None:
    program = built("dualpipe-v", 4, 8)
    path = tmp_path / "x.csv"
    path.write_text(to_csv(program.schedule))
    alone = build_program(choose(str(path)), program.problem.with_options(pairs=False))
    assert not alone.schedule.pairs
    assert build_program(choose(str(path)), program.problem).digest == program.digest


# --- the command line


def run(*args: str) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_commands(tmp_path: Path) -> None:
    csv = tmp_path / "x.csv"
    asked = ("dualpipe-v", "--pp", "2", "-m", "8", OVERLAP, "--costs", COSTS)
    svg, page = tmp_path / "x.svg", tmp_path / "x.html"
    told = run("simulate", *asked, "--csv", str(csv), "--plot", str(svg), "--html", str(page))
    assert "pairs of passes" in told
    # Both timelines of a picture used to be called dualpipe-v, whether passes overlapped in them or
    # not.
    titles = re.findall(r"(dualpipe-v.*): bubble", svg.read_text())
    assert [run["title"] for run in data_in(page.read_text())["runs"]] == titles
    assert titles == ["dualpipe-v", "dualpipe-v, pairing of passes"]
    assert "of 32" in told
    data = json.loads(run("simulate", *asked, "--json"))
    assert f"{data['pairs']} of 32" in told
    assert f"{data['pairs']} of its forward passes run as one with a backward pass" in run(
        "verify", str(csv)
    )


def test_a_certificate_knows_nothing_of_pairs() -> None:
    result = CliRunner().invoke(
        app, ["simulate", "zb-v", "--pp", "2", "-m", "4", OVERLAP, "--certify", "1"]
    )
    assert "--certify computes a lower bound for passes that run one" in result.output


def test_a_plan_of_a_dense_model_has_no_pairs() -> None:
    model = "layers=8,hidden=64,heads=4,sequence=64,vocabulary=128"
    sizes = f"pp=2,m=8,{model}"
    result = CliRunner().invoke(app, ["plan", sizes, OVERLAP, "--gpu", "h100"])
    assert f"{OVERLAP}: the model that sizes describe has no experts" in result.output


def test_a_plan_compares_with_and_without() -> None:
    """A plan compares schedules with and without overlapped passes, recommends overlapped passes if
    they gain time, and says which flag to write. Linear placements have none."""
    training = Training(
        2, 8, lambda placement: parse_costs(COSTS, placement), options=ScheduleOptions(pairs=True)
    )
    variant_of = training.variant
    made = make_plan(variant_of, specs=["zb-v", "1f1b", "1f1b-v"])
    assert [bool(candidate.report.pairs) for candidate in made.candidates] == [True, False, False]
    assert made.candidates[0].schedule == "zb-v"
    written = [flags_of(candidate)[2:] for candidate in made.candidates]
    assert written == [("--overlap-moe-expert-parallel-comm",), (), ()]


# --- pictures


def test_a_pair_is_a_box_of_two_colours(tmp_path: Path) -> None:
    program = proved(by_hand(GOOD))
    timeline = simulate(program, PROBLEM.costs)
    draw([timeline], tmp_path / "x.svg")
    (run_of,) = [simulated_run("by hand", program)]
    halves = {box.half: box for box in run_of.boxes if box.half is not None}
    assert {half: (box.stage, box.kind) for half, box in halves.items()} == {
        0: (3, "F"),
        1: (3, "I"),
    }
    assert halves[0].end == halves[1].start
    draw([simulate(proved(by_hand()), PROBLEM.costs)], tmp_path / "y.svg")
    assert (tmp_path / "x.svg").read_text() != (tmp_path / "y.svg").read_text()


def test_a_trace_keeps_pairs(tmp_path: Path) -> None:
    timeline = simulate(proved(by_hand(GOOD)), PROBLEM.costs)
    passes = replace(
        timeline,
        events=tuple(event for event in timeline.events if is_compute(event.action)),
        schedule=replace(timeline.schedule, rows=timeline.schedule.compute_rows),
    )
    TraceFile(tmp_path / "trace.json").add(traced_step(0, passes, passes, 0.0))
    (step,) = read_trace(tmp_path)
    assert step.measured.schedule.pairs == timeline.schedule.pairs
    assert {box.half for box in of_passes("x", step.measured, lambda a: 1.0).boxes} == {None, 0, 1}
