"""Schedules of two model copies: DualPipe's public order, random ones, and how long they take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random

from megatron_ext.compile.two_copies.two_copies import TwoCopies
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.schedule import Schedule

_F, _I, _W, _B = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD


def dualpipe(ranks: int, microbatches: int) -> TwoCopies:
    """Return DualPipe (DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1), in its eight published
    steps. Passes have a direction: 0 if the microbatch entered the pipeline at the end that is
    nearer to the rank, otherwise 1.

    ``ranks`` is even. ``microbatches``, the number of both copies together, is even and at least
    twice the number of ranks.
    """
    half = ranks // 2

    def passes(near: int) -> Iterator[tuple[int, Kind]]:
        """Yield the passes of a rank that is ``near`` steps from its end of the pipeline."""
        far = half - near - 1
        # DualPipe's step 1: nF0 (n times F of direction 0).
        yield from [(0, _F)] * (2 * far)
        # DualPipe's step 2: nF0F1 (F of both directions).
        yield from [(0, _F), (1, _F)] * (near + 1)
        # DualPipe's step 3: nB1W1F1, with backward passes split into I and W (zero bubble).
        yield from [(1, _I), (1, _W), (1, _F)] * far
        # DualPipe's step 4, the main step: nF0B1F1B0.
        yield from [(0, _F), (1, _B), (1, _F), (0, _B)] * (microbatches // 2 - ranks + near + 1)
        # DualPipe's step 5: nB1F1B0 (no F of direction 0 is left).
        yield from [(1, _B), (1, _F), (0, _B)] * far
        # DualPipe's step 6: nB1B0, the second half with split backward passes.
        late: list[tuple[int, Kind]] = []
        for number in range(near + 1):
            for direction in (1, 0):
                if 2 * number + (direction == 0) >= near + 1:
                    late.append((direction, _W))
                    yield direction, _I
                else:
                    yield direction, _B
        # DualPipe's step 7: nWB0, with split backward passes.
        for _ in range(far):
            yield late.pop(0)
            late.append((0, _W))
            yield 0, _I
        # DualPipe's step 8: nW (the remaining W).
        yield from late

    def row(rank: int) -> Iterator[Action]:
        done: Counter[tuple[int, Kind]] = Counter()
        near = min(rank, ranks - 1 - rank)
        for direction, kind in passes(near):
            stage = ranks - 1 - near if direction else near
            covered = [(direction, part) for part in RULES[kind].covers]
            k = done[covered[0]]
            done.update(covered)
            yield Action(stage, kind, k)

    rows = tuple(tuple(row(rank)) for rank in range(ranks))
    return TwoCopies("dualpipe", tuple(range(ranks)), rows)


def random_two_copies(random: Random) -> TwoCopies:
    """Return a symmetric schedule that is sound by construction: each pair of opposite ranks takes,
    at random, one of the passes that can run. Forward passes of all stages come in one order."""
    half, microbatches = random.randint(1, 4), random.randint(1, 4)
    ranks, waves = 2 * half, random.randint(0, 1)
    rank_of = tuple(range(ranks)) + tuple(reversed(range(ranks))) * waves
    last = len(rank_of) - 1
    rows: list[list[Action]] = [[] for _ in range(half)]
    ready = [Action(0, _F, k) for k in random.sample(range(microbatches), microbatches)]
    while ready:
        action = random.choice(ready)
        if action.kind is _F:
            # Forward passes run in the order in which they become possible.
            action = next(a for a in ready if a[:2] == action[:2])
        ready.remove(action)
        stage, kind, k = action
        rows[min(rank_of[stage], ranks - 1 - rank_of[stage])].append(action)
        if kind is _F:
            ready.append(Action(stage, _B, k) if stage == last else Action(stage + 1, _F, k))
        elif stage:
            ready.append(Action(stage - 1, _B, k))
    near = tuple(map(tuple, rows))
    return TwoCopies("random", rank_of, (*near, *reversed(near)))


def makespan(copies: TwoCopies, hop: float) -> float:
    """Return the makespan of ``copies``, in which F takes 1, B 2, I and W 1 each on every stage,
    and a message ``hop``. Each pass runs as soon as its rank is free and its input is there."""
    return _makespan(copies.rows, len(copies.rank_of), copies.copy_of, copies.rank_with, hop)


def makespan_of_one(schedule: Schedule, hop: float) -> float:
    """Return the makespan of ``schedule``, which has one model copy, by the rules of `makespan`."""
    placement = schedule.placement
    return _makespan(
        schedule.rows,
        placement.stages,
        copy_of=lambda rank, stage: 0,
        rank_with=lambda copy, stage: placement.rank_of[stage],
        hop=hop,
    )


def _makespan(
    rows: Sequence[Sequence[Action]],
    stages: int,
    copy_of: Callable[[int, int], int],
    rank_with: Callable[[int, int], int],
    hop: float,
) -> float:
    seconds = {_F: 1.0, _I: 1.0, _W: 1.0, _B: 2.0}
    at, free = [0] * len(rows), [0.0] * len(rows)
    ends: dict[tuple[int, int, Kind, int], float] = {}

    def begins(rank: int, action: Action) -> float:
        """Return the time at which the input of ``action`` is on ``rank``; infinity if it is not
        known yet."""
        stage, kind, k = action
        copy = copy_of(rank, stage)
        if kind is _W or (kind is not _F and stage == stages - 1):
            return ends.get((copy, stage, _I if kind is _W else _F, k), math.inf)
        other = stage - 1 if kind is _F else stage + 1
        if other < 0:
            return 0.0
        kinds = (_F,) if kind is _F else (_I, _B)
        end = min(ends.get((copy, other, made, k), math.inf) for made in kinds)
        return end + hop * (rank_with(copy, other) != rank)

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and begins(rank, row[at[rank]]) < math.inf:
                action = row[at[rank]]
                free[rank] = max(free[rank], begins(rank, action)) + seconds[action.kind]
                ends[copy_of(rank, action.stage), *action] = free[rank]
                at[rank] += 1
                moved = True
    assert at == [len(row) for row in rows], "ranks wait for one another"
    return max(free)
