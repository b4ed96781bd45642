"""Tests of the values of --pipeline-metrics, which are computed from each rank's own clock."""

from __future__ import annotations

import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.observe.metrics import (
    PATIENCE,
    Departure,
    Metrics,
    RankSums,
    metrics_of,
    telling_passes,
)
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.timeline import Timeline

GIB = 2**30


def program_of(spec: str, ranks: int, microbatches: int) -> Program:
    resolved = choose(spec)
    placement = resolved.place(ranks)
    costs = uniform(placement, 10, 12, 8, 0.5)
    return build_program(resolved, Problem(placement, microbatches, costs))


def told(program: Program, steps: list[Timeline]) -> list[RankSums]:
    """Return the sums that each rank reports of ``steps``. In each step, the rank's clock begins at
    its first pass."""
    ranks = []
    for rank in range(program.problem.ranks):
        sums = RankSums()
        for step in steps:
            row = step.compute[rank]
            start = row[0].start
            passes = [row[number] for number in telling_passes(program, rank)]
            times = [time - start for event in passes for time in (event.start, event.end)]
            busy = sum(event.end - event.start for event in row)
            sums += RankSums(1, busy, row[-1].end - start, tuple(times))
        ranks.append(sums)
    return ranks


def metrics(ranks: list[RankSums], predicted: Timeline, *, overlap: bool = False) -> Metrics:
    result = metrics_of(ranks, predicted, overlap=overlap)
    assert result is not None
    return result


SPECS = (
    *("gpipe", "1f1b", "interleaved", "interleaved-zb", "gis"),
    *("zb-h1", "zb-2p", "zb-v", "v-half", "v-min", "dualpipe-v"),
)


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("spec", SPECS)
def test_ranks_that_share_no_clock_give_the_makespan(spec: str, ranks: int) -> None:
    """The makespan can be computed for ranks without a common clock, because a rank's first pass
    and its last I wait for messages of neighbours."""
    program = program_of(spec, ranks, 3 * ranks)
    predicted = simulate(program, program.problem.costs)
    measured = metrics(told(program, [predicted, predicted.moved(0.0, 3.0)]), predicted)
    assert measured.seconds[1] == pytest.approx(2 * predicted.makespan, rel=0.004)
    assert measured.bubble_shares[0] == pytest.approx(predicted.bubble_share_makespan)
    assert measured.bubble_shares[1] == pytest.approx(predicted.bubble_share_makespan, abs=0.004)
    assert measured.seconds[0] == pytest.approx(2 * predicted.makespan), "with costs twice as high"


def test_steps_that_overlap_take_their_span() -> None:
    program = program_of("zb-2p", 4, 12)
    predicted = simulate(program, program.problem.costs)
    measured = metrics(told(program, [predicted.moved(0.0, 2.0)]), predicted, overlap=True)
    assert measured.seconds == pytest.approx((2 * predicted.span, 2 * predicted.span))
    assert measured.bubble_shares == pytest.approx((predicted.bubble_share_span,) * 2)
    assert predicted.bubble_share_span < predicted.bubble_share_makespan - 0.03
    assert "of the span" in measured.line(1, 2)


def test_reported_sums_are_read_back_from_their_numbers() -> None:
    """The sums that a rank reports can be sent as plain numbers and read back, for a rank with
    fewer stages than another too, and for one without any step."""
    sums = RankSums(2, 3.0, 4.0, (0.5, 1.0, 2.0, 3.0), 5 * GIB, 6 * GIB)
    assert RankSums.of(sums.numbers(1)) == sums
    assert len(sums.numbers(2)) == len(RankSums().numbers(2))
    assert RankSums.of(sums.numbers(2)).times[:4] == sums.times


def test_sums_are_added_and_peaks_are_not() -> None:
    first = RankSums(1, 1.0, 2.0, (0.0, 1.0), 5 * GIB, 9 * GIB)
    assert RankSums() + first == first
    both = first + RankSums(2, 3.0, 5.0, (0.5, 2.0), 6 * GIB, 8 * GIB)
    assert both == RankSums(3, 4.0, 7.0, (0.5, 3.0), 6 * GIB, 9 * GIB)


def test_a_rank_without_a_step_makes_no_figures() -> None:
    program = program_of("1f1b", 2, 4)
    predicted = simulate(program, program.problem.costs)
    ranks = told(program, [predicted])
    assert metrics_of([ranks[0], RankSums()], predicted, overlap=False) is None


def slow(rank: int, factor: float) -> tuple[Program, Timeline, list[RankSums]]:
    """Return program, prediction and reported sums of three ranks, of which ``rank`` takes
    ``factor`` times its costs. Rank 0 has twice the work of each other rank."""
    resolved = choose("zb-h1")
    placement = resolved.place(3)
    costs = uniform(placement, 10, 12, 8)
    costs = costs.with_passes(
        seconds={k: (2 * row[0], *row[1:]) for k, row in costs.seconds.items()}
    )
    program = build_program(resolved, Problem(placement, 6, costs))
    predicted = simulate(program, costs)
    seconds = {
        kind: tuple(s * (factor if stage == rank else 1.0) for stage, s in enumerate(row))
        for kind, row in costs.seconds.items()
    }
    return (
        program,
        predicted,
        told(program, [simulate(program, costs.with_passes(seconds=seconds))]),
    )


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_is_slow_compared_with_what_is_predicted_of_each(rank: int) -> None:
    """A rank is called slow if it takes longer than was predicted for that rank. Rank 0, which has
    twice the work, takes longest and is not slow."""
    _, predicted, ranks = slow(rank, 1.25)
    measured = metrics(ranks, predicted)
    assert measured.slowest == rank and measured.slower == pytest.approx(0.25)
    figures = measured.figures()
    assert figures["pipeline/slowest rank"] == rank
    assert figures["pipeline/slowest rank, slower by"] == pytest.approx(0.25)


def test_the_line_of_an_interval() -> None:
    shares, seconds = (0.071, 0.1234), (0.7901, 1.2345)
    measured = Metrics(shares, seconds, False, 2, 0.04, (int(61.2 * GIB), 0), (int(70.3 * GIB), 1))
    assert measured.line(11, 20) == (
        "iterations 11 to 20: bubble 12.3% of the makespan (predicted 7.1%), "
        "step 1.234 s (predicted 790.1 ms), "
        "slowest rank 2, its passes take 1.04 times the others', "
        "peak 61.2 GiB allocated (rank 0), 70.3 GiB reserved (rank 1)"
    )
    assert measured.figures()["pipeline/peak bytes reserved"] == int(70.3 * GIB)
    assert measured.figures()["pipeline/peak bytes reserved, rank"] == 1


def test_metrics_without_an_estimate_predict_nothing() -> None:
    """Metrics of a model with sparse attention, of which there is no estimate, have no predicted
    bubble or time, and no warning compares them. They used to show the bubble of plain attention as
    the predicted one, and a warning reported the difference."""
    program = program_of("1f1b", 2, 4)
    predicted = simulate(program, program.problem.costs)
    ranks = told(program, [predicted])
    known = metrics(ranks, predicted)
    measured = metrics_of(ranks, predicted, overlap=False, has_estimate=False)
    assert measured is not None
    assert measured.bubble_shares == (None, known.bubble_shares[1])
    assert measured.seconds == (None, known.seconds[1])
    line = measured.line(1, 10)
    assert line.count("(no estimate)") == 2 and "predicted" not in line
    assert Departure().see(measured, PATIENCE) is None


def test_memory_that_is_not_measured_is_omitted() -> None:
    program = program_of("1f1b", 2, 4)
    predicted = simulate(program, program.problem.costs)
    measured = metrics(told(program, [predicted]), predicted)
    assert measured.allocated is None and measured.reserved is None
    assert measured.line(7, 7).startswith("iteration 7: ") and "peak" not in measured.line(7, 7)
    assert not [name for name in measured.figures() if "bytes" in name]


def test_the_fullest_rank_is_named() -> None:
    program = program_of("1f1b", 2, 4)
    predicted = simulate(program, program.problem.costs)
    first, last = told(program, [predicted])
    ranks = [first + RankSums(allocated=3 * GIB, reserved=8 * GIB), last]
    ranks[1] += RankSums(allocated=4 * GIB, reserved=5 * GIB)
    measured = metrics(ranks, predicted)
    assert measured.allocated == (4 * GIB, 1)
    assert measured.reserved == (8 * GIB, 0)


def with_bubble(measured: float) -> Metrics:
    return Metrics((0.10, measured), (1.0, 1.0), False, 0, 0.0, None, None)


def test_leaving_the_prediction_is_reported_once() -> None:
    departure = Departure()
    near, far = with_bubble(0.149), with_bubble(0.151)
    for _ in range(PATIENCE):
        assert departure.see(near, 10) is None
    for _ in range(PATIENCE // 10 - 1):
        assert departure.see(far, 10) is None
    assert departure.see(near, 10) is None, "it has come back"
    for _ in range(PATIENCE // 10 - 1):
        assert departure.see(far, 10) is None
    warning = departure.see(far, 10)
    assert warning == (
        "for 100 iterations the bubble has been more than 5 points above what is predicted "
        "(15.1%, predicted 10.0%): in the next launch write --pipeline-trace traces "
        "--pipeline-trace-iters 10:12, and 'megatron-ext trace traces' tells why"
    )
    for _ in range(PATIENCE):
        assert departure.see(far, 10) is None, "again"


def test_a_bubble_below_the_prediction_leaves_it_too() -> None:
    """A measured bubble that stays below the prediction is reported too: the costs are wrong then,
    and another schedule may be better."""
    warning = Departure().see(with_bubble(0.04), PATIENCE)
    assert warning is not None and "5 points below" in warning
