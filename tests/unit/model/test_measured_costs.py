"""Tests of costs from measured passes, of the file that they are written to, and of predictions
made with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.output_layer import (
    better_of,
    costs_in,
    output_layer_waits,
    place_output_layer,
)
from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.measured_costs import RankFigures, measured_costs, medians
from megatron_ext.cost_model.model import stages_of
from megatron_ext.cost_model.rates import CPU
from megatron_ext.cost_model.short_form import Described
from megatron_ext.observe.prediction import RankStep, compare_prediction
from megatron_ext.observe.program_summary import stock_1f1b, summary_of_change
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, LinkCosts, PassCosts, VocabularyCosts
from megatron_ext.schedule.costs_text import load_costs, save_costs
from megatron_ext.schedule.kinds import RULES, Held
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement, line
from megatron_ext.schedule.problem import Problem, ScheduleOptions, VocabularyParallel

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
NONE, ONE, TWO = VocabularyParallel
RANKS, MICROBATCHES = 4, 8


def estimated(placement: Placement, vocabulary: int = 2000) -> Costs:
    gpt = Described(16, hidden=128, heads=4, sequence=64, micro_batch=2, vocabulary=vocabulary)
    stages = stages_of(gpt.model, gpt.model.evenly(placement.stages))
    return estimate(gpt.model, stages, gpt.execution(), CPU)


def real(costs: Costs) -> Costs:
    """Return the costs of a machine on which each stage is slower than in ``costs``, by a factor of
    its own."""
    factors = [1.5 + 0.1 * stage for stage in range(costs.stages)]
    seconds = {
        kind: tuple(factor * cost for factor, cost in zip(factors, row, strict=True))
        for kind, row in costs.seconds.items()
    }
    assert costs.vocabulary is not None
    forward, input_gradient, weight_gradient = (
        factors[-1] * x for x in costs.vocabulary.output_layer
    )
    vocabulary = replace(costs.vocabulary, output_layer=(forward, input_gradient, weight_gradient))
    return replace(
        costs.with_passes(seconds=seconds).with_links(p2p_seconds=3 * costs.links.p2p_seconds),
        vocabulary=vocabulary,
    )


def placed(spec: str, vocabulary: VocabularyParallel = NONE, rows: int = 2000) -> Program:
    resolved = choose(spec)
    placement = resolved.place(RANKS)
    costs = estimated(placement, rows)
    return place_output_layer(
        resolved,
        Problem(placement, MICROBATCHES, costs, options=ScheduleOptions(vocab_parallel=vocabulary)),
    )


def recorded(program: Program, truth: Costs) -> list[RankFigures]:
    """Return the seconds and bytes that the ranks of a machine with the costs ``truth`` measure."""
    in_passes = costs_in(program, truth)
    assert in_passes.held_bytes is not None
    figures = []
    for rank, row in enumerate(simulate(program, in_passes).compute):
        held: dict[tuple[int, Held], float] = {}
        for event in row:
            for kind in RULES[event.action.kind].acquires:
                if kind is not Held.LOGITS:
                    held[event.action.stage, kind] = in_passes.held_bytes[kind][event.action.stage]
        figures.append(
            RankFigures(medians(row), held, [truth.links.p2p_seconds] if rank < RANKS - 1 else [])
        )
    return figures


@pytest.mark.parametrize("rows", [50, 2000], ids=["a small head", "a large head"])
@pytest.mark.parametrize(
    ("spec", "vocabulary"),
    [
        *((spec, NONE) for spec in ("1f1b", "zb-h1", "zb-auto", "interleaved", "zb-v")),
        *((spec, NONE) for spec in ("dualpipe-v", "1f1b-v", "hanayo")),
        *((spec, way) for spec in ("zb-h1", "1f1b", "zb-v") for way in (ONE, TWO)),
    ],
)
def test_what_the_passes_cost_is_recovered(
    spec: str, vocabulary: VocabularyParallel, rows: int
) -> None:
    """The costs of F, I and W are recovered from measured passes, also if a measured pass contains
    more than one of them: a B, an I with the output layer's weight gradient, or logits that are
    computed with their gradient."""
    before = placed(spec, vocabulary, rows)
    guess = estimated(before.schedule.placement, rows)
    truth = real(guess)
    # The parts of a split vocabulary are on all ranks, which have one speed in this test.
    if vocabulary is not NONE:
        assert guess.vocabulary is not None and truth.vocabulary is not None
        # The estimate adds launches, rescaling and contention, which measured passes already
        # contain.
        truth_of_ends = replace(guess.vocabulary, launch=0.0, rescaling=0.0, contention=(0.0, 0.0))
        truth = truth.without_vocabulary().with_vocabulary(truth_of_ends)
    measured = measured_costs(before, guess, recorded(before, truth), "here")
    for kind in (F, I, W):
        assert measured.seconds[kind] == pytest.approx(truth.seconds[kind]), kind
    assert measured.links.p2p_seconds == pytest.approx(truth.links.p2p_seconds)
    assert measured.vocabulary is not None and truth.vocabulary is not None
    assert measured.vocabulary.output_layer == pytest.approx(truth.vocabulary.output_layer)
    assert measured.held_bytes is not None and truth.held_bytes is not None
    for held, figures in measured.held_bytes.items():
        assert figures == pytest.approx(truth.held_bytes[held]), held
    assert measured.origin.startswith("measured: here")


def test_costs_of_the_output_layer_are_recovered_wherever_its_weight_gradient_is() -> None:
    """The costs of the output layer are recovered from a program that computes its weight gradient
    in I, and from one that computes it in W."""
    assert not output_layer_waits(placed("zb-h1"))
    assert output_layer_waits(placed("zb-h1", rows=50))


def test_of_several_ranks_of_a_stage_the_median_and_the_most_bytes_count() -> None:
    before = placed("zb-h1")
    guess = estimated(line(RANKS))
    ranks = []
    for factor in (1.0, 2.0, 9.0):
        for rank in recorded(before, guess):
            ranks.append(
                RankFigures(
                    {key: factor * value for key, value in rank.seconds.items()},
                    {key: factor * value for key, value in rank.held.items()},
                    [factor * seconds for seconds in rank.p2p_seconds],
                )
            )
    measured = measured_costs(before, guess, ranks, "here")
    assert measured.seconds[F] == pytest.approx([2 * cost for cost in guess.seconds[F]])
    assert measured.links.p2p_seconds == pytest.approx(4 * guess.links.p2p_seconds)
    assert measured.held_bytes is not None and guess.held_bytes is not None
    expected = [9 * size for size in guess.held_bytes[Held.ACTIVATION]]
    assert measured.held_bytes[Held.ACTIVATION] == pytest.approx(expected)


def test_bytes_that_are_not_known_are_not_made_up() -> None:
    before = placed("zb-h1")
    guess = estimated(line(RANKS))
    ranks = [replace(rank, held={}) for rank in recorded(before, guess)]
    assert measured_costs(before, guess, ranks, "here").held_bytes is None


def test_what_r_takes_is_measured_where_there_was_one() -> None:
    before, guess = placed("zb-h1"), estimated(line(RANKS))
    ranks = recorded(before, guess)
    assert not measured_costs(before, guess, ranks, "here").passes.recompute
    longer = 2 * guess.seconds[F][1]
    ranks[1] = replace(ranks[1], seconds={**ranks[1].seconds, (1, Kind.RECOMPUTE): longer})
    measured = measured_costs(before, guess, ranks, "here")
    f = measured.seconds[F]
    assert measured.passes.recompute == (f[0], longer, f[2], f[3])


def test_a_median_is_of_a_stage_and_a_kind() -> None:
    program = placed("zb-h1")
    events = [e for row in simulate(program, program.problem.costs).compute for e in row]
    slow = next(e for e in events if e.action.stage == 0 and e.action.kind is Kind.FORWARD)
    events[events.index(slow)] = slow._replace(end=slow.end + 100)
    assert medians(events) == pytest.approx(medians(e for e in events if e is not slow))


def test_costs_are_written_as_they_are_read(tmp_path: Path) -> None:
    placement = line(RANKS)
    costs = replace(real(estimated(placement)), origin="measured: zb-h1 on 4 ranks")
    save_costs(costs, tmp_path / "costs.json")
    read = load_costs(tmp_path / "costs.json", placement)
    for kind in (F, I, W):
        assert read.seconds[kind] == pytest.approx(costs.seconds[kind], rel=1e-5)
    assert costs.vocabulary is not None and read.vocabulary is not None
    assert read.links.p2p_seconds == pytest.approx(costs.links.p2p_seconds, rel=1e-5)
    assert read.vocabulary.output_layer == pytest.approx(costs.vocabulary.output_layer, rel=1e-5)
    assert read.vocabulary.logits_bytes == costs.vocabulary.logits_bytes
    assert read.held_bytes is not None and costs.held_bytes is not None
    for held, figures in costs.held_bytes.items():
        assert read.held_bytes[held] == pytest.approx(figures, abs=1)
    assert read.origin == f"{tmp_path / 'costs.json'} (measured: zb-h1 on 4 ranks)"
    lines = (tmp_path / "costs.json").read_text().splitlines()
    assert lines[1] == '  "version": 2,' and len(lines) == len(json.loads("\n".join(lines))) + 2


def test_costs_without_bytes_and_vocabulary_are_written_too(tmp_path: Path) -> None:
    costs = Costs(PassCosts({F: (1, 2), I: (3, 4), W: (0, 5)}), LinkCosts(0.5))
    save_costs(costs, tmp_path / "costs.json")
    read = load_costs(tmp_path / "costs.json", line(2))
    assert read.seconds == costs.seconds and read.links.p2p_seconds == 0.5
    assert read.held_bytes is None and read.vocabulary is None


@pytest.mark.parametrize("command", [["simulate", "zb-auto"], ["plan"]])
def test_commands_take_the_written_file(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs = real(estimated(line(RANKS)))
    save_costs(costs, path)
    sizes = ["--pp", str(RANKS), "-m", str(MICROBATCHES)]
    if command == ["plan"]:
        sizes = [f"pp={RANKS},m={MICROBATCHES}"]
    words = [*sizes, "--costs", str(path), "--json"]
    result = CliRunner().invoke(app, [*command, *words, "--memory-limit", "1GiB"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    candidates = report["plan"]["candidates"] if command == ["plan"] else [report]
    rows = {row["schedule"]: row for row in candidates}
    problem = Problem(line(RANKS), MICROBATCHES, costs)
    assert rows["zb-auto"]["makespan"] < stock_1f1b(problem).makespan
    if command == ["plan"]:
        assert rows["1f1b"]["makespan"] == pytest.approx(stock_1f1b(problem).makespan, rel=1e-4)


# ---- changes by measured costs


def test_a_line_says_what_measured_costs_have_changed() -> None:
    """A log line says by how much measured costs change the predicted step. Here the first stage
    is slow, and the schedule was made without knowing that."""
    guess = estimated(line(RANKS))
    problem = Problem(line(RANKS), MICROBATCHES, guess, MemoryLimit(microbatches=4))
    slow = {kind: (2 * row[0], *row[1:]) for kind, row in guess.seconds.items()}
    truth = guess.with_passes(seconds=slow)
    before = place_output_layer(choose("zb-auto"), problem)
    now = place_output_layer(choose("zb-auto"), replace(problem, costs=truth))
    stock = stock_1f1b(replace(problem, costs=truth)).makespan
    gains = []
    for program in (now, before):
        makespan = simulate(program, costs_in(program, truth)).makespan
        gain = stock / makespan - 1
        pace = "faster" if gain > 0 else "slower"
        gains.append(f"{abs(gain):.1%} {pace} than 1F1B, peak 4 microbatches")
    assert gains[0] != gains[1]
    assert summary_of_change(before, now, truth) == (
        f"zb-auto, measured costs: predicted {gains[0]} (was {gains[1]} with estimated costs)"
    )


def test_a_schedule_that_has_not_changed_says_so() -> None:
    before = placed("zb-h1")
    truth = real(estimated(line(RANKS)))
    now = place_output_layer(choose("zb-h1"), replace(before.problem, costs=truth))
    assert summary_of_change(before, now, truth).endswith("(as with estimated costs)")


def test_an_order_that_is_better_stays_where_it_may() -> None:
    """If a search with measured costs finds a worse order than the one that runs, the running order
    stays, with new places for its messages, unless the memory limit forbids it. Here the schedule
    zb-auto finds a worse order."""
    guess = estimated(line(RANKS))
    problem = Problem(line(RANKS), MICROBATCHES, guess, MemoryLimit(microbatches=3))
    before = place_output_layer(choose("zb-auto"), problem)
    slow = {**guess.seconds, I: tuple(3 * cost for cost in guess.seconds[I])}
    other = replace(problem, costs=guess.with_passes(seconds=slow))

    def makespan(program: Program) -> float:
        return simulate(program, costs_in(program, other.costs)).makespan

    now = place_output_layer(choose("zb-auto"), other)
    assert makespan(now) > makespan(before)
    again = better_of(now, before, choose("zb-auto"), other)
    assert again.schedule.compute_rows == before.schedule.compute_rows
    # The program has the passes of `before`, but its messages have other places.
    assert makespan(again) <= makespan(before)
    assert again.problem.costs != before.problem.costs
    less = replace(other, memory_limit=MemoryLimit(microbatches=2))
    now = place_output_layer(choose("zb-auto"), less)
    again = better_of(now, before, choose("zb-auto"), less)
    assert max(peaks(again.schedule, in_microbatches(again.schedule))) == 2


# ---- predictions compared with measurements


def test_a_comparison_is_of_medians_over_steps_and_makespans_over_ranks() -> None:
    program = placed("zb-h1")
    predicted = simulate(program, program.problem.costs)
    first = [RankStep(0, 8, 5), RankStep(10, 19, 6), RankStep(20, 40, 7)]
    other = [RankStep(1, 10, 4), RankStep(11, 20, 4), RankStep(21, 60, 4)]
    comparison = compare_prediction(predicted, [first, other, other, other])
    assert (comparison.measured, comparison.steps) == (10, 3)
    assert comparison.measured_busy == (6, 4, 4, 4)
    assert comparison.predicted == predicted.makespan
    assert comparison.error == pytest.approx(10 / predicted.makespan - 1)
    assert comparison.bubble_shares == pytest.approx((predicted.bubble_share_makespan, 0.55))
    lines = comparison.lines()
    assert len(lines) == RANKS
    assert lines[0].startswith("pipeline rank 0: step predicted ")
    assert "measured 1e+04 ms" in lines[0] and lines[0].endswith(
        "measured 40.0%; median of 3 steps"
    )
    assert "measured 60.0%;" in lines[1]


def test_the_whole_vocabulary_is_what_its_shards_take() -> None:
    """The costs of the whole output layer and of the whole embedding are computed from measured
    passes of their shards. For the embedding there is no estimate."""
    before = placed("zb-v", ONE)
    guess = estimated(before.schedule.placement)
    layers = guess.without_vocabulary()
    vocabulary = VocabularyCosts((4.0, 8.0, 12.0), (1.0, 2.0), 1000.0)
    ranks = recorded(before, layers.with_vocabulary(vocabulary))
    measured = measured_costs(before, guess, ranks, "here").vocabulary
    assert measured is not None
    assert measured.output_layer == pytest.approx((4.0, 8.0, 12.0))
    assert measured.embedding == pytest.approx((1.0, 2.0))
