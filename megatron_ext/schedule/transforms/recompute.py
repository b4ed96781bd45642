"""Give activations up after F, and make them again before they are needed.

Mario (Liu et al. 2025, PPoPP, 10.1145/3710848.3710878). Of what a forward pass makes, the stage's
input is kept alone; before the backward pass a second forward pass (R) makes the rest again. It
stands right before the backward pass: where that waits for its gradient, R runs in the bubble.

The transform works on a schedule of compute actions. Into a memory limit it gives up the fewest:
those that wait the longest first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.limit import fits
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.program.memory import Amount, amount_of, peak
from megatron_ext.schedule.schedule import Schedule

_GOLDEN = 0.6180339887498949

_Made = tuple[int, int]  # an activation, by its stage and microbatch


def recompute(schedule: Schedule, problem: Problem) -> Schedule:
    """``schedule``, which has passes only, with those that make activations again.

    One that has some already is left as it is.
    """
    if any(_is_again(action) for row in schedule.rows for action in row):
        return schedule
    if problem.extras.recompute.fit:
        limit = problem.memory_limit
        assert limit is not None
        amount, allowed = amount_of(limit, schedule, problem.costs)
        rows = [_fitting(row, amount, allowed, problem) for row in schedule.rows]
    else:
        first = problem.extras.recompute.first
        rows = [
            _with_again(row, [made for made in _made(row, problem) if made[0] < first])
            for row in schedule.rows
        ]
    return replace(schedule, rows=tuple(rows))


def _is_again(action: Action) -> bool:
    return RULES[action.kind].repeats is not None


def _fitting(
    row: tuple[Action, ...], amount: Amount, allowed: float, problem: Problem
) -> tuple[Action, ...]:
    """``row`` with the fewest that bring it within what is ``allowed``; with all if none do."""
    made = _longest_waiting_first(row, problem)

    def with_first(count: int) -> tuple[Action, ...]:
        return _with_again(row, made[:count])

    count = bisect_left(
        range(len(made)), True, key=lambda n: fits(peak(with_first(n), amount), allowed)
    )
    return with_first(count)


def _made(row: Sequence[Action], problem: Problem) -> list[_Made]:
    """The activations that are kept for a backward pass."""
    trained = problem.first_trained
    return [(a.stage, a.microbatch) for a in row if a.kind is Kind.FORWARD and a.stage >= trained]


def _longest_waiting_first(row: Sequence[Action], problem: Problem) -> list[_Made]:
    """The stages first whose activations wait the longest; within a stage the microbatches in an
    order in which the first n, for any n, are evenly spread over the step."""
    place = {
        (action.stage, kind, action.microbatch): at
        for at, action in enumerate(row)
        for kind in RULES[action.kind].covers
    }
    waits: dict[int, list[int]] = defaultdict(list)
    for stage, k in (made := _made(row, problem)):
        waits[stage].append(place[stage, Kind.BACKWARD_INPUT, k] - place[stage, Kind.FORWARD, k])
    longest = sorted(waits, key=lambda stage: -sum(waits[stage]) / len(waits[stage]))
    return sorted(made, key=lambda m: (longest.index(m[0]), m[1] * _GOLDEN % 1))


def _with_again(row: Sequence[Action], given_up: Collection[_Made]) -> tuple[Action, ...]:
    """``row`` with R right before each backward pass of what is ``given_up``."""
    chosen, new_row = set(given_up), list[Action]()
    for action in row:
        is_backward = Kind.BACKWARD_INPUT in RULES[action.kind].covers
        if is_backward and (action.stage, action.microbatch) in chosen:
            new_row.append(action._replace(kind=Kind.RECOMPUTE))
        new_row.append(action)
    return tuple(new_row)
