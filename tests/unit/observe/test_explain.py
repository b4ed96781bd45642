"""Tests of explanations of a step's time: simulated steps with a known cause, and parts that must
add up to the whole."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.observe.explain import TOP, Explanation, MakespanPart, explain
from megatron_ext.observe.replay import Replay
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import VocabularyCosts, uniform
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.timeline import Event, Timeline
from tests.helpers.random_schedules import PROPERTY, random_case
from tests.helpers.schedules import drawn, line_problem, program, table


def step(drawing: str) -> Timeline:
    """Return the timeline that `tests.helpers.schedules.drawn` would print as ``drawing``, with one
    stage a rank."""
    events: list[Event] = []
    for rank, text in enumerate(table(drawing).splitlines()):
        for column, cell in enumerate(text.split()[1:]):
            if cell == "=":
                last = events[-1]
                events[-1] = Event(rank, last.action, last.start, column + 1)
            elif cell != ".":
                action = Action(rank, Kind(cell[0]), int(cell[1:]))
                events.append(Event(rank, action, column, column + 1))
    ranks = 1 + events[-1].rank
    rows = tuple(tuple(e.action for e in events if e.rank == rank) for rank in range(ranks))
    timeline = Timeline(Schedule("drawn", line(ranks), rows), tuple(events))
    assert drawn(timeline) == table(drawing)
    return timeline


PREDICTED = step("""
    0 F0 F1 .  . B0 = F2 B1 = .  B2 =
    1 .  F0 B0 = F1 B1 = F2 B2 = .  .
""")
OWN = {MakespanPart.WORK: 9.0, MakespanPart.SCHEDULE: 3.0}

LATE_MESSAGE = """
    0 F0 F1 .  . .  .  . B0 = F2 B1 = .  B2 =
    1 .  F0 B0 = F1 B1 = .  . .  F2 B2 = .  .
"""
SLOW_PASS = """
    0 F0 F1 .  . B0 = F2 . .  . B1 = .  B2 =
    1 .  F0 B0 = F1 = =  = B1 = F2 B2 = .  .
"""
SLOW_RANK = """
    0 F0 F1 . .  . . . B0 = F2 . . . B1 = .  . . . B2 =
    1 .  F0 = B0 = = = F1 = B1 = = = F2 = B2 = = = .  .
"""
PAUSE = """
    0 F0 F1 .  . B0 = F2 . .  . B1 = .  B2 =
    1 .  F0 B0 = F1 . .  . B1 = F2 B2 = .  .
"""


@pytest.mark.parametrize(
    ("drawing", "part", "seconds", "words"),
    [
        (
            LATE_MESSAGE,
            MakespanPart.MESSAGES,
            3,
            "messages from rank 1 to rank 0 came late: 3e+03 ms in",
        ),
        (
            SLOW_PASS,
            MakespanPart.SLOW_PASSES,
            3,
            "1F1 on rank 1 was a slow pass: 4e+03 ms, usually 1e+03",
        ),
        (
            SLOW_RANK,
            MakespanPart.SLOW_RANKS,
            9,
            "rank 1 is slow: compared with other ranks its passes take 2.00",
        ),
        (
            PAUSE,
            MakespanPart.BETWEEN,
            3,
            "rank 1 did nothing between passes, waiting for no other: 3e+03",
        ),
    ],
)
def test_one_thing_is_wrong(drawing: str, part: MakespanPart, seconds: float, words: str) -> None:
    explanation = explain(step(drawing), PREDICTED)
    assert explanation.parts == pytest.approx(
        dict.fromkeys(MakespanPart, 0.0) | OWN | {part: seconds}
    )
    assert [cause.seconds for cause in explanation.causes] == pytest.approx([seconds])
    assert explanation.causes[0].text.startswith(words)


def test_two_things_are_wrong() -> None:
    """If a pass is slow and a message is late, the explanation names only the pass, because the
    rank that receives the message would have had to wait for that pass anyway."""
    explanation = explain(
        step("""
            0 F0 F1 .  . .  . B0 = F2 . B1 = .  B2 =
            1 .  F0 B0 = F1 = =  = B1 = F2 B2 = .  .
        """),
        PREDICTED,
    )
    assert explanation.parts[MakespanPart.SLOW_PASSES] == pytest.approx(3)
    assert explanation.parts[MakespanPart.MESSAGES] == pytest.approx(0)
    assert [cause.text.split(" was")[0] for cause in explanation.causes] == ["1F1 on rank 1"]


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_nothing_is_wrong(factor: float) -> None:
    """If all passes take their predicted time, in whatever unit, the explanation finds no cause:
    all idle time is the schedule's own."""
    explanation = explain(PREDICTED.moved(7.0, factor), PREDICTED)
    expected = {part: seconds * factor for part, seconds in OWN.items()}
    assert explanation.parts == pytest.approx(dict.fromkeys(MakespanPart, 0.0) | expected)
    assert explanation.causes == ()


def test_passes_in_other_proportions() -> None:
    """The explanation attributes idle time to costs if passes have other proportions than
    predicted. Each rank has the predicted amount of work, but on rank 0 F takes three times as long
    as B."""
    measured = step("""
        0 F0 = = F1 = = F2 = = .  .  . . B0 . . B1 . . B2
        1 .  . . F0 . . F1 . . F2 B0 = = B1 = = B2 = = .
    """)
    predicted = step("""
        0 F0 F1 F2 .  .  . . B0 = = B1 = = B2 = =
        1 .  F0 F1 F2 B0 = = B1 = = B2 = = .  . .
    """)
    expected = {MakespanPart.WORK: 12.0, MakespanPart.SCHEDULE: 4.0, MakespanPart.COSTS: 4.0}
    explanation = explain(measured, predicted)
    assert explanation.parts == pytest.approx(dict.fromkeys(MakespanPart, 0.0) | expected)


def randomly_measured(seed: int) -> tuple[Timeline, Timeline]:
    """Return a predicted step, and a measured one with random durations of passes and random
    delays."""
    random = Random(seed)
    schedule = random_case(seed).schedule
    replay = Replay(schedule)
    seconds = {action: random.uniform(0.5, 4) for action in replay.inputs}
    delays = {action: random.choice([0, 0, random.random()]) for action in replay.inputs}
    return replay.run(lambda action: 1.0), replay.run(seconds.__getitem__, delays.__getitem__)


@PROPERTY
@given(st.integers(0, 2**32))
def test_the_parts_add_up(seed: int) -> None:
    predicted, measured = randomly_measured(seed)
    explanation: Explanation = explain(measured, predicted)
    assert list(explanation.parts) == list(MakespanPart)
    assert sum(explanation.parts.values()) == pytest.approx(measured.makespan)
    saved = [cause.seconds for cause in explanation.causes]
    assert len(saved) <= TOP and saved == sorted(saved, reverse=True)
    assert all(0 < seconds < measured.makespan for seconds in saved)


@PROPERTY
@given(st.integers(0, 2**32))
def test_a_step_replayed_as_it_was_is_that_step(seed: int) -> None:
    _, measured = randomly_measured(seed)
    replay = Replay(measured.schedule)
    events = {event.action: event for row in measured.compute for event in row}
    ready = replay.ready(events)
    again = replay.run(
        lambda action: events[action].end - events[action].start,
        lambda action: events[action].start - max(ready[action]),
    )
    for event in again.events:
        assert event.start == pytest.approx(events[event.action].start - measured.start)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zb-v", "hanayo"])
def test_a_replay_with_the_costs_is_the_simulation(name: str) -> None:
    """A replay of a schedule with its costs equals the simulation. Messages of these schedules take
    no time, because a replay has no messages."""
    placement = choose(name).place(3)
    costs = uniform(placement, 3, 4, 2)
    made = program(name, Problem(placement, 6, costs))
    replayed = Replay(made.schedule).run(costs.of)
    assert replayed.compute == simulate(made, costs).compute


@pytest.mark.parametrize("how", [VocabularyParallel.ONE, VocabularyParallel.TWO])
def test_a_replay_knows_what_collectives_bring(how: VocabularyParallel) -> None:
    """With a split vocabulary, a replayed pass starts after the collectives that it needs. In the
    simulation the pass also waits until all ranks have joined these collectives."""
    placement = choose("zb-v").place(3)
    costs = replace(
        uniform(placement, 9, 12, 6), vocabulary=VocabularyCosts((3, 3, 3), (1, 1), 0.0)
    )
    made = program(
        "zb-v", Problem(placement, 6, costs, options=ScheduleOptions(vocab_parallel=how))
    )
    passes = Schedule("passes", placement, made.schedule.compute_rows)
    replayed, costs = Replay(passes), made.problem.costs
    assert Kind.LOGITS_INPUT in {
        maker.kind for makers in replayed.inputs.values() for maker in makers
    }
    simulated = simulate(made, costs)
    for ours, row in zip(replayed.run(costs.of).compute, simulated.compute, strict=True):
        for event, expected in zip(ours, row, strict=True):
            assert 0 <= expected.start - event.start + 1e-9 < 0.02 * simulated.makespan


def test_a_replay_needs_no_messages_in_the_schedule() -> None:
    made = program("1f1b", line_problem(2, 3, 1, 1, 1))
    alone = Schedule("alone", made.schedule.placement, made.schedule.compute_rows)
    assert drawn(Replay(alone).run(made.problem.costs.of)) == drawn(PREDICTED)
