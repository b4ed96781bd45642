"""Divide embedding and output layer over all ranks, and make their passes part of the schedule.

Vocabulary parallelism (Yeung et al. 2024, "Balancing Pipeline Parallelism with Vocabulary
Parallelism", section 4). Between the last stage's forward and backward pass of a microbatch, all
ranks make logits on their shard (S), exchange the statistics of the softmax, and make their part of
the hidden states' gradient (SI); the shard's own gradient (SW) can wait. So the backward pass comes
one interval later than in the schedule without (two with variant 1, which has two exchanges one
after the other), and every rank holds one microbatch more (two):

    rank 0   F0 F1 F2 F3          S0    B0 SI0 SW0 ...        an interval: F, B (or I and W), S, SI
    rank 1      F0 F1 F2          S0 B0    SI0 SW0            and SW of one microbatch
    rank 2         F0 F1          S0 F2 ...
                   (F0 of the last rank, then S0 everywhere)

The transform works on any compute schedule. It takes the times at which that would run, moves each
backward pass by whole intervals, gives the new passes their times between, and orders each rank's
actions by time. Times rise along every dependency, so nothing can wait in a circle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES, Duty, Where
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Problem, Schedule, VocabularyParallel
from megatron_ext.schedule.simulate import simulate_unproved
from megatron_ext.schedule.timeline import Event, Timeline

# Intervals between the last stage's forward and backward pass, and so microbatches held more.
INTERVALS = {VocabularyParallel.ONE: 2, VocabularyParallel.TWO: 1}


# The stage whose rank sends a broadcast. The others post it ahead, as receives are.
_ROOTS = {Kind.BCAST_E: 0, Kind.BCAST_EW: 0, Kind.BCAST_S: -1, Kind.BCAST_SW: -1}


@dataclass(frozen=True)
class _Delays:
    """In intervals: of SI after S, of SW after SI."""

    input_gradient: float
    weight_gradient: float


_DELAYS = {
    VocabularyParallel.ONE: [_Delays(1, w) for w in (0, 0.5, 1)],
    VocabularyParallel.TWO: [_Delays(i, w) for i, w in itertools.product((0.5, 0.75), (0, 0.5, 1))],
}


def divide_vocabulary(schedule: Schedule, problem: Problem) -> Schedule:
    """``schedule``, which has compute actions only, with the vocabulary's passes and collectives.

    Of several places for SI and SW the one with the shortest makespan.
    """
    base = simulate_unproved(schedule, problem)
    candidates = [_divided(base, problem, delays) for delays in _DELAYS[problem.vocabulary]]
    return min(candidates, key=lambda candidate: simulate_unproved(candidate, problem).makespan)


def _divided(base: Timeline, problem: Problem, delays: _Delays) -> Schedule:
    placement, hop = problem.placement, problem.costs.hop
    interval = max(sum(e.end - e.start for e in row) for row in base.compute) / problem.microbatches
    later = INTERVALS[problem.vocabulary] * interval
    passes: list[list[tuple[float, Action]]] = [[] for _ in base.compute]
    instant: list[list[tuple[float, Action]]] = [[] for _ in base.compute]
    first: dict[int, Event] = {}  # by microbatch: the forward pass of the first and the last stage
    last: dict[int, Event] = {}
    back: dict[int, float] = {}  # when the first stage's backward pass has ended
    for rank, row in enumerate(base.compute):
        for event in row:
            stage, kind, microbatch = event.action
            is_forward = kind is Kind.FORWARD
            into = passes if event.end > event.start else instant
            into[rank].append((event.start + (0.0 if is_forward else later), event.action))
            if is_forward and stage == 0:
                first[microbatch] = event
            if is_forward and stage == placement.stages - 1:
                last[microbatch] = event
            if Duty.INPUT_GRADIENT in RULES[kind].covers and stage == 0:
                back[microbatch] = event.end + later

    shards: list[list[tuple[float, Action]]] = [[] for _ in base.compute]
    for microbatch in range(problem.microbatches):
        looked_up = first[microbatch].start - interval
        logits = last[microbatch].end + hop
        input_gradient = logits + delays.input_gradient * interval
        statistics = (logits + input_gradient) / 2
        weight_gradient = input_gradient + delays.weight_gradient * interval
        times = [
            (looked_up - interval / 2, (Kind.BCAST_E,)),
            (looked_up, (Kind.EMBEDDING, Kind.REDUCE_E)),
            (last[microbatch].end, (Kind.BCAST_S,)),
            (logits, (Kind.LOGITS, Kind.GATHER_S)),
            (statistics, (Kind.LOSS, Kind.BCAST_SW)),
            (input_gradient, (Kind.LOGITS_INPUT, Kind.REDUCE_SI)),
            (weight_gradient, (Kind.LOGITS_WEIGHT,)),
            (back[microbatch], (Kind.BCAST_EW,)),
            (back[microbatch] + interval, (Kind.EMBEDDING_WEIGHT,)),
        ]
        for time, kinds in times:
            for kind in kinds:
                for rank, stage in _places(kind, placement):
                    is_posted = kind in _ROOTS and rank != placement.rank_of[_ROOTS[kind]]
                    ahead = interval if is_posted else 0.0
                    shards[rank].append((time - ahead, Action(stage, kind, microbatch)))

    # Sorting keeps the order of what has the same time: a pass that could start is no reason to
    # let all ranks wait for this one's part. (One that takes no time has ended, though.)
    rows = (
        tuple(action for _, action in sorted([*at_once, *own, *layers], key=lambda item: item[0]))
        for at_once, own, layers in zip(instant, shards, passes, strict=True)
    )
    return Schedule(base.schedule.name, placement, tuple(rows))


def _places(kind: Kind, placement: Placement) -> Iterator[tuple[int, int]]:
    """The ranks that have ``kind``, and their first stages."""
    for rank, stages in enumerate(placement.stages_of):
        if RULES[kind].where is Where.SHARD or rank == placement.rank_of[-1]:
            yield rank, stages[0]
