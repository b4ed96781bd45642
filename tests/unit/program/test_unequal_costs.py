"""Tests of steps of unequal microbatches, against the simulator that runs the same passes one by
one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.compile.program.simulate import seconds_of, simulate
from megatron_ext.compile.program.unequal import UnequalSteps, with_unequal_microbatches
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.action_arrays import IS_PASS
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.dealing import arranged
from megatron_ext.schedule.microbatch_costs import (
    DRAWN_STEPS,
    PASSES,
    BatchSize,
    parse_microbatch_costs,
    read_loads,
)
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.schedule_csv import from_csv
from megatron_ext.schedule.slices import Lengths, Slices
from tests.unit.commands.test_cli import run
from tests.unit.program.test_noise import COSTS, program


@pytest.mark.parametrize("spec", ["1f1b", "zb-h1", "zb-v"])
def test_equal_microbatches_take_what_the_simulator_says(spec: str) -> None:
    here = program(spec, 4, 8)
    made = with_unequal_microbatches(here, dict.fromkeys(PASSES, np.ones((2, 24))), 3)
    expected = simulate(here, here.problem.costs).makespan
    assert made.arrival == made.ordered == made.dealt == pytest.approx(expected)
    assert (made.steps, made.replicas) == (2, 3)


@pytest.mark.parametrize(("spec", "slices"), [("1f1b", 1), ("zb-v", 1), ("1f1b", 2)])
def test_every_pass_of_a_microbatch_takes_its_cost(spec: str, slices: int) -> None:
    """Every pass of a microbatch takes as long as the microbatch's cost says. The reference is a
    loop over the actions of each replica; the slowest replica counts."""
    here = program(spec, 4, 8, slices=Slices(slices, Lengths.EVEN))
    costs = np.random.default_rng(1).lognormal(0, 0.5, 16)
    rows = arranged(costs, 2, deal=True)
    own = seconds_of(here.graph, here.schedule, here.problem.costs)
    arrays, ends = here.schedule.arrays, []
    for row in rows:
        seconds = [
            lasts * costs[row[microbatch // slices]] if IS_PASS[kind] else lasts
            for lasts, microbatch, kind in zip(
                own, arrays.microbatch.tolist(), arrays.kind.tolist(), strict=True
            )
        ]
        ends.append(max(here.graph.longest_paths(seconds)[1]))
    steps = UnequalSteps(here)
    assert steps.makespan(dict.fromkeys(PASSES, costs), rows) == pytest.approx(max(ends))
    assert max(ends) > min(ends)


def test_on_one_rank_a_step_takes_the_sum_of_the_slowest_replica() -> None:
    # Costs of eight microbatches. Dealt in order of arrival, the two replicas take 30 and 10.
    costs = np.array([[9.0, 1, 8, 2, 7, 3, 6, 4]])
    made = with_unequal_microbatches(program("1f1b", 1, 4), dict.fromkeys(PASSES, costs), 2)
    assert (made.arrival, made.ordered) == (30 * 30, 30 * 30)
    assert made.dealt == 30 * 20


def test_kinds_of_their_own_costs() -> None:
    """Each kind of pass may have its own cost for each microbatch, and only the given kinds take
    longer: with forward passes twice as long, each microbatch takes F once more."""
    steps = UnequalSteps(program("1f1b", 1, 4))
    kind = next(kind for kind in PASSES if kind.name == "FORWARD")
    assert steps.makespan({kind: np.full(4, 2.0)}, np.arange(4)[None]) == 4 * (2 * 10 + 20)


def test_drawn_tokens_have_the_deviation_that_is_written() -> None:
    drawn = parse_microbatch_costs("lognormal:0.5", 1000)
    tokens = drawn.tokens
    assert tokens.shape == (DRAWN_STEPS, 1000)
    assert tokens.mean() == pytest.approx(1, abs=0.02) and tokens.std() == pytest.approx(
        0.5, rel=0.1
    )
    assert np.allclose(drawn.squares, tokens**2 / (tokens**2).mean())
    assert np.allclose(parse_microbatch_costs("lognormal:0", 4).tokens, 1)


def test_a_file_has_microbatches_step_after_step(tmp_path: Path) -> None:
    """A file of costs has a line for each microbatch: first those of step 1, then those of step 2,
    and so on. A line has the lengths of the documents in the microbatch, or the microbatch's
    cost."""
    file = tmp_path / "costs.txt"
    file.write_text("2\n4\n6\n8\n\n100\n")
    made = parse_microbatch_costs(str(file), 2)
    assert made.tokens.tolist() == [[0.4, 0.8], [1.2, 1.6]]
    file.write_text("3 1\n4\n2, 2\n1,1 1\n")
    made = parse_microbatch_costs(str(file), 2)
    assert np.allclose(made.tokens * 3.75, [[4, 4], [4, 3]])
    assert np.allclose(made.squares * 9.25, [[10, 16], [8, 3]])


def test_loads_are_over_those_of_whole_sequences(tmp_path: Path) -> None:
    """The loads of a microbatch of documents are relative to those of a microbatch of whole
    sequences, here two of 4 tokens each. Padding belongs to the last document."""
    file = tmp_path / "lengths.txt"
    file.write_text("4 4\n4 2 1\n")
    made = read_loads(file, BatchSize(1, 2, 2, 4))
    assert made.tokens.tolist() == [[1, 7 / 8]] and made.squares.tolist() == [[1, 21 / 32]]
    padded = read_loads(file, BatchSize(1, 2, 2, 4, is_padded=True))
    assert padded.tokens.tolist() == [[1, 1]] and padded.squares.tolist() == [[1, 24 / 32]]
    file.write_text("9\n1\n")
    with pytest.raises(
        ValueError, match="line 1: 9 tokens are too many, as a microbatch of this launch has 8"
    ):
        read_loads(file, BatchSize(1, 2, 2, 4, is_padded=True))


def test_answers_that_share_a_prompt_are_counted_with_it_once(tmp_path: Path) -> None:
    """Answers that share a prompt count the prompt once. Here a prompt of 4 tokens has answers of 2
    and 3 tokens; the second line has two sequences of 6 and 7 tokens, which count it twice."""
    file = tmp_path / "groups"
    file.write_text("4+2+3\n6, 7\n")
    made = read_loads(file, BatchSize(2, 1, 1, 16))
    assert made.tokens.tolist() == [[9 / 16, 13 / 16]]
    # Pairs of tokens that attend to one another: 4 x 4 / 2 within the prompt, 2 x 4 + 2 x 2 / 2 for
    # the first answer, and 3 x 4 + 3 x 3 / 2 for the second.
    pairs = 16 / 2 + (2 * 4 + 4 / 2) + (3 * 4 + 9 / 2)
    assert made.squares.tolist() == [[2 * pairs / 256, (36 + 49) / 256]]
    padded = read_loads(file, BatchSize(2, 1, 1, 16, is_padded=True))
    assert padded.tokens.tolist() == [[1, 1]]
    file.write_text("4+\n")
    with pytest.raises(ValueError, match="line 1: '' is no positive number"):
        read_loads(file, BatchSize(1))


def test_attention_alone_grows_with_squares(tmp_path: Path) -> None:
    """Only the time of attention grows with the squares of lengths. Attention has the same share of
    F as of I and W together, and the latter is all in I."""
    file = tmp_path / "lengths.txt"
    file.write_text("4\n2 2\n")
    loads = read_loads(file, BatchSize(1, 2, 1, 4))
    costs = parse_costs("f=10,i=12,w=8,comm=1,attention=0.5", line(2))
    made = {kind: own.tolist() for kind, own in loads.costs(costs).items()}
    assert made[Kind.FORWARD] == made[Kind.RECOMPUTE] == [[1, 0.75]]
    assert made[Kind.BACKWARD_INPUT] == [[1, pytest.approx(7 / 12)]]
    assert made[Kind.BACKWARD_WEIGHT] == [[1, 1]]
    assert made[Kind.FULL_BACKWARD] == [[1, 0.75]]


@pytest.mark.parametrize(
    ("text", "lines", "fault"),
    [
        ("lognormal:", "", "'' is no number from 0 to 10"),
        ("lognormal:-1", "", "'-1' is no number"),
        ("lognormal:nan", "", "'nan' is no number"),
        ("missing.txt", "", "'missing.txt' name no file"),
        ("", "1\n", "has 1 microbatch, and a step of all replicas has 2"),
        ("", "1\nx\n", "line 2: 'x' is no positive number"),
        ("", "1\n0\n", "line 2: '0' is no positive number"),
        ("", "1\ninf\n", "line 2: 'inf' is no positive number"),
    ],
)
def test_faults_of_costs(text: str, lines: str, fault: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.txt"
    file.write_text(lines)
    with pytest.raises(ValueError, match=fault):
        parse_microbatch_costs(text or str(file), 2)


def test_the_command_says_what_ordering_and_dealing_gain() -> None:
    line = ["simulate", "zb-h1", "--pp", "4", "-m", "8", "--costs", COSTS]
    line += ["--microbatch-costs", "lognormal:0.5"]
    alone = run(*line)
    assert "ordered, small ends" in alone and "and dealt" not in alone
    dealt = run(*line, "--deal", "4")
    assert "and dealt" in dealt and "and a program for the places" in dealt
    figures = json.loads(run(*line, "--deal", "4", "--json"))["unequal_microbatches"]
    assert figures["dealt"] < figures["ordered"] < figures["arrival"]
    assert (figures["steps"], figures["replicas"]) == (DRAWN_STEPS, 4)
    assert ("; kept" in dealt) is (figures["profile"] < figures["dealt"])
    of_1f1b = json.loads(run("simulate", "1f1b", *line[2:], "--deal", "4", "--json"))
    assert of_1f1b["unequal_microbatches"]["profile"] is None
    assert "unequal_microbatches" not in json.loads(run(*line[:-2], "--json"))
    assert "add --microbatch-costs" in run(*line[:-2], "--deal", "4", code=2)


def test_files_are_of_the_better_program_at_the_places(tmp_path: Path) -> None:
    """The files that ``simulate`` writes contain the better of two programs, and each microbatch at
    the position that this program gives it.

    In the trace a box is as wide as the mean cost at its position. The CSV table has the program
    that is kept.
    """
    line = ["simulate", "v-half", "--pp", "2", "-m", "4", "--costs", COSTS]
    files = ["--perfetto", str(tmp_path / "trace.json"), "--csv", str(tmp_path / "rows.csv")]
    equal = run(*line, "--csv", str(tmp_path / "equal.csv"), "--json")
    unequal = [*line, "--microbatch-costs", "lognormal:0.5", "--deal", "4"]
    assert "; kept" in run(*unequal, *files)
    rows = [from_csv((tmp_path / name).read_text(), "").rows for name in ("equal.csv", "rows.csv")]
    assert rows[0] != rows[1] and sorted(rows[0][0]) == sorted(rows[1][0])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    forwards = {event["name"]: event["dur"] for event in events if "F" in event.get("name", "")}
    took = [forwards[f"0F{k}"] for k in range(4)]
    assert took[0] < took[1] and took[3] < took[2]
    assert json.loads(equal)["makespan"]
