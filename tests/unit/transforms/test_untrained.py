"""Tests of stages before the first trained stage: they run only forward passes, and no gradient is
sent to them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_bytes, in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import InvalidSchedule, Program, prove
from megatron_ext.compile.registry import choose
from megatron_ext.compile.transforms.omitted_backward import without_backward
from megatron_ext.observe.metrics import metrics_of
from megatron_ext.observe.program_summary import summarize
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import VocabularyCosts, uniform
from megatron_ext.schedule.kinds import RULES, Held, Lane
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import P2P, Offload, Problem
from tests.unit.observe.test_metrics import told

FAMILIES = (
    *("1f1b", "gpipe", "zb-h1", "zb-auto", "2bp"),
    *("interleaved", "interleaved-zb", "zb-v", "v-half", "v-min", "dualpipe-v", "hanayo"),
)
M = 6


def problem(spec: str, first_trained_stage: int, **options: object) -> Problem:
    placement = choose(spec).place(3)
    held = dict.fromkeys((Held.ACTIVATION, Held.WEIGHT_INPUTS), (8.0,) * placement.stages)
    costs = uniform(placement, 10, 12, 8, 0.5).with_passes(held_bytes=held)
    costs = costs.with_host((1.0,) * placement.stages, (1.0,) * placement.stages)
    asked = Problem(placement, M, costs, first_trained_stage=first_trained_stage)
    return asked.with_options(**options)


def made(spec: str, first_trained_stage: int, **options: object) -> Program:
    return build_program(choose(spec), problem(spec, first_trained_stage, **options))


def kinds_of(program: Program, stage: int) -> Counter[Kind]:
    rows = program.schedule.rows
    return Counter(action.kind for row in rows for action in row if action.stage == stage)


@pytest.mark.parametrize(
    ("spec", "p2p"),
    [
        *((spec, P2P.ASYNC) for spec in FAMILIES),
        *((spec, P2P.BATCHED) for spec in ("zb-h1", "interleaved-zb", "zb-v")),
    ],
)
def test_only_forward_passes_run_and_no_gradient_is_sent(spec: str, p2p: P2P) -> None:
    whole = made(spec, 0, p2p=p2p)
    stages = whole.problem.placement.stages
    for first in range(1, stages):
        program = made(spec, first, p2p=p2p)
        for stage in range(stages):
            kinds, expected = kinds_of(program, stage), kinds_of(whole, stage)
            if stage < first:
                expected = Counter({k: n for k, n in expected.items() if RULES[k].in_evaluation})
            elif stage == first:
                del expected[Kind.SEND_B], expected[Kind.WAIT_B]
            assert kinds == expected, (first, stage)


@pytest.mark.parametrize("spec", FAMILIES)
def test_it_takes_less_time_and_memory(spec: str) -> None:
    whole, program = made(spec, 0), made(spec, 2)
    time, before = (simulate(made, made.problem.costs) for made in (program, whole))
    assert time.makespan <= before.makespan
    of_stages = program.problem.placement.stages_of
    amount = in_microbatches(program.schedule)
    for stages, now, then in zip(
        of_stages, peaks(program.schedule, amount), peaks(whole.schedule, amount), strict=True
    ):
        assert now <= then
        if max(stages) < 2:
            assert now == 0


@pytest.mark.parametrize("first_trained_stage", [1, 2])
@pytest.mark.parametrize("spec", ["1f1b", "zb-h1", "interleaved-zb", "zb-v"])
def test_messages_do_not_pile_up(spec: str, first_trained_stage: int) -> None:
    """Messages of untrained stages do not pile up.

    Untrained stages have less work than trained stages and wait for no gradient. If they waited for
    their sends only at the end of the row, they would have finished when the trained stages have
    just begun.
    """
    costs = problem(spec, 0).costs.with_links(message_bytes=1.0)
    asked = replace(problem(spec, first_trained_stage), costs=costs, microbatches=24)
    program = build_program(choose(spec), asked)
    received: Counter[int] = Counter()
    for row in program.schedule.rows:
        waiting = 0
        for action in row:
            if action.kind is Kind.RECV_F:
                waiting += 1
            elif action.kind is Kind.FORWARD and action._replace(kind=Kind.RECV_F) in row:
                waiting -= 1
            received[waiting] += 1
    assert max(received) <= 3
    unsent = Counter[Kind]()
    for action in program.schedule.rows[program.problem.placement.rank_of[0]]:
        unsent[action.kind] += 1
        assert unsent[Kind.SEND_F] - unsent[Kind.WAIT_F] <= 2 * len(program.schedule.rows)


def test_the_proof_knows() -> None:
    """The proof finds a backward pass before the first trained stage, a missing one after it, and a
    gradient that is sent to an untrained stage."""
    whole, program = made("zb-h1", 0), made("zb-h1", 1)
    with pytest.raises(
        InvalidSchedule, match="0RECV_B0 has no place, as nothing before stage 1 is"
    ):
        prove(whole.schedule, program.problem)
    with pytest.raises(InvalidSchedule, match="0I0 is missing"):
        prove(program.schedule, whole.problem)
    row = program.schedule.rows[1]
    at = row.index(Action(1, Kind.BACKWARD_INPUT, 0)) + 1
    rows = (program.schedule.rows[0], (*row[:at], Action(1, Kind.SEND_B, 0), *row[at:]))
    sends = replace(program.schedule, rows=(*rows, program.schedule.rows[2]))
    with pytest.raises(
        InvalidSchedule, match="1SEND_B0 has no place, as nothing before stage 1 is"
    ):
        prove(sends, program.problem)


@pytest.mark.parametrize("spec", ["zb-h1", "zb-v"])
def test_untrained_stages_are_not_offloaded(spec: str) -> None:
    program = made(spec, 2, activation_offload=Offload.FULL)
    copied = {
        action.stage
        for row in program.schedule.rows
        for action in row
        if RULES[action.kind].lane is Lane.TO_HOST
    }
    assert copied and min(copied) >= 2


@pytest.mark.parametrize("first_trained_stage", [1, 2])
def test_post_validation(first_trained_stage: int) -> None:
    program = made("zb-h1", first_trained_stage, steps_overlap=True)
    assert all(any(a.kind is Kind.STEP for a in row) for row in program.schedule.rows)


def test_what_is_kept_counts_against_a_limit() -> None:
    """Memory of trained stages counts against a limit, and untrained stages hold none. With an
    untrained first stage the second rank of 1F1B holds the most: two microbatches of 8 bytes each.
    If all stages are trained, the first rank holds three."""
    within = replace(problem("1f1b", 1), memory_limit=MemoryLimit(bytes=16))
    program = build_program(choose("1f1b"), within)
    assert peaks(program.schedule, in_bytes(program.problem.costs)) == [0, 16, 8]
    with pytest.raises(InvalidSchedule, match="over the memory limit"):
        build_program(choose("1f1b"), replace(within, first_trained_stage=0))


def test_costs() -> None:
    costs = uniform(choose("1f1b").place(3), 3, 2, 1).with_vocabulary(
        VocabularyCosts((4.0, 5.0, 6.0), (1.0, 2.0), 10.0)
    )
    cut = without_backward(costs.with_passes(held_bytes=None), 2)
    assert cut.seconds == {
        Kind.FORWARD: (4.0, 3.0, 7.0),
        Kind.BACKWARD_INPUT: (0.0, 0.0, 7.0),
        Kind.BACKWARD_WEIGHT: (0.0, 0.0, 7.0),
    }


def test_a_line_says_so() -> None:
    assert "; stage 0 has nothing to train, and forward passes alone;" in summarize(
        made("zb-h1", 1)
    )
    assert "; stages 0 to 1 have nothing to train, and forward passes alone;" in summarize(
        made("zb-h1", 2)
    )
    assert "nothing to train" not in summarize(made("zb-h1", 0))


@pytest.mark.parametrize("spec", ["1f1b", "interleaved-zb", "zb-v"])
def test_clocks_are_compared_by_what_is_sent(spec: str) -> None:
    """The clocks of ranks with untrained stages are compared by the messages that they send. No
    gradient comes back to these ranks that could bound their clocks."""
    program = made(spec, 2)
    timeline = simulate(program, program.problem.costs)
    metrics = metrics_of(told(program, [timeline]), timeline, overlap=False)
    assert metrics is not None
    assert metrics.seconds[1] == pytest.approx(timeline.makespan, rel=0.2)
