"""Recompute: activations are freed after F, and recomputed before they are needed.

Mario (Liu et al. 2025, PPoPP, 10.1145/3710848.3710878). A forward pass stores only the stage's
input; a second forward pass (R) recomputes the activation. R stands right before the backward pass:
if the backward pass waits for its gradient, R runs in the bubble.

The transform works on a schedule of compute actions. To meet a memory limit it recomputes as few
activations as possible, the longest-waiting first. If the tensors that wait for W take too much
memory, W comes sooner.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megatron_ext.compile.program.memory import Amount, kept_for_recompute, limited_amount, peak
from megatron_ext.schedule.action import Action, Kind, Row, token_share
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.limit import fits
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule

_GOLDEN = 0.6180339887498949

_Made = tuple[int, int]  # stage and microbatch of an activation


def recompute(schedule: Schedule, problem: Problem) -> Schedule:
    """Return a schedule of compute actions with recomputation passes R, as the problem requests.

    A schedule that has R already is returned unchanged.
    """
    if any(RULES[action.kind].repeats for row in schedule.rows for action in row):
        return schedule
    requested = problem.options.recompute
    if requested.fit:
        limit = problem.memory_limit
        assert limit is not None
        memory = _RankMemory(*limited_amount(limit, schedule, problem.costs))
        rows = [_fitting(row, memory, problem) for row in schedule.rows]
    else:
        rows = [
            _with_recompute(
                row, [made for made in _made(row, problem) if made[0] < requested.first]
            )
            for row in schedule.rows
        ]
    return replace(schedule, rows=tuple(rows))


@dataclass(frozen=True)
class _RankMemory:
    """Memory that a rank may hold, and the function ``amount`` that counts it."""

    amount: Amount
    allowed: float

    def holds(self, row: Row) -> bool:
        return fits(peak(row, self.amount), self.allowed)

    def change(self, action: Action, recomputed: Collection[_Made]) -> tuple[float, float]:
        """Return the memory that ``action`` allocates at its start, and that it frees at its end.

        ``recomputed`` are the activations that are recomputed later.
        """
        stage, kind, microbatch = action
        rule = RULES[kind]
        takes = sum(self.amount(held, stage) for held in rule.acquires)
        if rule.repeats is not None:
            takes -= kept_for_recompute(stage, microbatch, self.amount)
        elif kind is Kind.FORWARD and (stage, microbatch) in recomputed:
            takes = kept_for_recompute(stage, microbatch, self.amount)
        gives, tokens = (
            sum(self.amount(held, stage) for held in rule.releases),
            token_share(microbatch),
        )
        return takes * tokens, gives * tokens


def _fitting(row: Row, memory: _RankMemory, problem: Problem) -> Row:
    """Return a rank's ``row`` with the fewest recomputations R that keep its peak within
    ``memory``.

    If no number suffices, all activations are recomputed.
    """
    made = _longest_waiting_first(row, problem)

    def with_first(count: int) -> Row:
        recomputed = frozenset(made[:count])
        return _with_w_in_time(_with_recompute(row, recomputed), memory, recomputed)

    count = bisect_left(range(len(made)), True, key=lambda count: memory.holds(with_first(count)))
    return with_first(count)


def _made(row: Row, problem: Problem) -> list[_Made]:
    """Return the stage and microbatch of each activation that a rank's ``row`` stores.

    Stages without training store none.
    """
    trained = problem.first_trained_stage
    return [(a.stage, a.microbatch) for a in row if a.kind is Kind.FORWARD and a.stage >= trained]


def _longest_waiting_first(row: Row, problem: Problem) -> list[_Made]:
    """Return the activations of a rank's ``row`` in the order in which to recompute them.

    The stages whose activations wait the longest come first. Within a stage, the first n
    microbatches are for any n evenly spread over the step.
    """
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


def _with_recompute(row: Row, recomputed: Collection[_Made]) -> Row:
    """Return a rank's ``row`` with R before the backward pass of each activation in
    ``recomputed``."""
    new_row: list[Action] = []
    for action in row:
        is_backward = Kind.BACKWARD_INPUT in RULES[action.kind].covers
        if is_backward and (action.stage, action.microbatch) in recomputed:
            new_row.append(action._replace(kind=Kind.RECOMPUTE))
        new_row.append(action)
    return tuple(new_row)


def _with_w_in_time(
    row: Sequence[Action], memory: _RankMemory, recomputed: Collection[_Made]
) -> Row:
    """Return a rank's ``row`` with some W moved before a pass that otherwise has too little
    memory."""
    later = [action for action in row if action.kind is Kind.BACKWARD_WEIGHT]
    done: dict[Action, None] = {}  # actions that were placed, in their order
    held = 0.0

    def do(action: Action, takes: float, gives: float) -> None:
        nonlocal held
        held += takes - gives
        done[action] = None

    for action in row:
        if action in done:
            continue
        takes, gives = memory.change(action, recomputed)
        while not gives and not fits(held + takes, memory.allowed):
            ready = (w for w in later if w._replace(kind=Kind.BACKWARD_INPUT) in done)
            if (first := next(ready, None)) is None:
                break
            later.remove(first)
            do(first, *memory.change(first, recomputed))
        if action.kind is Kind.BACKWARD_WEIGHT:
            later.remove(action)
        do(action, takes, gives)
    return tuple(done)
