"""Partition of embedding and output layer over all ranks, with their passes as part of the
schedule.

This is vocabulary parallelism (Yeung et al. 2024, "Balancing Pipeline Parallelism with Vocabulary
Parallelism", section 4). Between the last stage's forward and backward pass of a microbatch, all
ranks compute logits on their shard (S), exchange the statistics of the softmax, and compute their
part of the hidden states' gradient (SI); the shard's own gradient (SW) can wait. The backward
passes therefore come later than in the original schedule, and every rank holds one microbatch more,
or two (`divide_vocabulary`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from megatron_ext.compile.program.simulate import simulate_unproved
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import RULES, Where
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.timeline import Timeline

# Number of microbatches by which vocabulary parallelism delays backward passes. As many more
# microbatches are held in memory.
INTERVALS = {VocabularyParallel.ONE: 2, VocabularyParallel.TWO: 1}

# Stage whose rank sends a broadcast, by kind of broadcast. The other ranks post the broadcast one
# interval earlier.
_ROOTS = {Kind.BCAST_E: 0, Kind.BCAST_EW: 0, Kind.BCAST_S: -1, Kind.BCAST_SW: -1}

_TICKS = 10**6  # number of ticks of the longest pass

# Seconds of passes by stage, kind (I and W in place of B) and microbatch.
_Times = dict[tuple[int, Kind, int], float]


def divide_vocabulary(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule``, which has compute actions only, with vocabulary passes and collectives.

    An interval is the time of one microbatch's forward pass (F), backward pass (B, or I and W), and
    passes of the output layer: logits (S), input gradient (SI) and weight gradient (SW). The
    backward passes come one interval later than in the original schedule, or two intervals with
    variant 1, which has two collectives in sequence.

    The transform works on any compute schedule. It takes the start times of the schedule's passes
    and

    - gives each backward pass the time of the same pass of the microbatch that is one (two) behind,
      so that the microbatches held are those of the schedule and one (two) more, whatever passes
      cost;
    - gives the new passes times between the passes that they need and the passes that need them;
    - orders each rank's actions by time.

    Times rise along every dependency, so there is no cyclic wait.

    Args:
        problem: has vocabulary parallelism, and costs with a partitioned vocabulary
            (`share_vocabulary`).
    """
    placement, costs = problem.placement, _in_ticks(problem.costs)
    base = simulate_unproved(schedule, replace(problem, costs=costs))
    interval = max(sum(e.end - e.start for e in row) for row in base.compute) / problem.microbatches
    starts = _delayed_starts(base, problem, interval)

    rows: list[list[tuple[float, Action]]] = [[] for _ in schedule.rows]
    for microbatch in range(problem.microbatches):
        for kind, time in _vocabulary_times(microbatch, starts, costs, placement, interval):
            for rank, stage in _places(kind, placement):
                is_posted = kind in _ROOTS and rank != placement.rank_of[_ROOTS[kind]]
                ahead = interval if is_posted else 0.0
                rows[rank].append((time - ahead, Action(stage, kind, microbatch)))
    for row, passes in zip(rows, schedule.rows, strict=True):
        for action in passes:
            begins_with = RULES[action.kind].covers[0]
            row.append((starts[action.stage, begins_with, action.microbatch], action))
        # Among actions with the same time those of vocabulary parallelism come first, because all
        # ranks wait for them.
        row.sort(key=lambda item: item[0])
    ordered = tuple(tuple(action for _, action in row) for row in rows)
    return Schedule(schedule.name, placement, ordered)


def _in_ticks(costs: Costs) -> Costs:
    """Return ``costs`` in whole ticks, at least one for each pass.

    Passes that depend on each other then never start together, and equal times are exactly equal.
    """
    tick = max(map(max, costs.seconds.values())) / _TICKS
    seconds = {
        kind: tuple(max(1.0, round(figure / tick)) for figure in figures)
        for kind, figures in costs.seconds.items()
    }
    p2p_ticks = tuple(float(round(p2p / tick)) for p2p in costs.links.p2p_seconds_by_stage)
    return costs.with_passes(seconds=seconds).with_links(
        p2p_seconds=round(costs.links.p2p_seconds / tick), p2p_seconds_by_stage=p2p_ticks
    )


def _delayed_starts(base: Timeline, problem: Problem, interval: float) -> _Times:
    """Return the start times of the passes of ``base``, with backward passes delayed.

    A backward pass is delayed by as many microbatches as `INTERVALS` says. The last microbatches
    have no microbatch so much later: their backward passes are shifted so far that all stay in
    order.
    """
    starts: _Times = {}
    for row in base.compute:
        for event in row:
            stage, kind, microbatch = event.action
            for after, covered in enumerate(RULES[kind].covers):  # within B, W comes after I
                starts[stage, covered, microbatch] = event.start + after
    stages = range(problem.placement.stages)
    order = sorted(range(problem.microbatches), key=lambda k: starts[stages[-1], Kind.FORWARD, k])
    count = INTERVALS[problem.options.vocab_parallel]
    left = order[-count:]
    backward = list(itertools.product(stages, (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)))
    lengths = (starts[*which, left[-1]] - starts[*which, left[0]] + 1 for which in backward)
    shift = max(count * interval, *lengths)
    later = dict(starts)
    for which in backward:
        for microbatch, behind in zip(order, order[count:], strict=False):
            later[*which, microbatch] = starts[*which, behind]
        for microbatch in left:
            later[*which, microbatch] = starts[*which, microbatch] + shift
    return later


def _vocabulary_times(
    microbatch: int, starts: _Times, costs: Costs, placement: Placement, interval: float
) -> Iterator[tuple[Kind, float]]:
    """Yield the kinds of vocabulary passes of a microbatch, with their start times.

    The logits' pass S comes before the last stage's backward pass. The pass of the gradient by
    hidden states (SI) comes halfway between S and that backward pass, and the pass of the rows'
    weight gradients (SW) half an interval later. (No other position that was tried makes a step
    shorter by more than 1 %.) The broadcast before S spans all links, and takes the mean of their
    messages, as every collective does (`Costs.of`).
    """
    last = placement.last
    embeddings = starts[0, Kind.FORWARD, microbatch] - interval
    hidden_states = starts[last, Kind.FORWARD, microbatch] + costs.seconds[Kind.FORWARD][last]
    gradient = starts[last, Kind.BACKWARD_INPUT, microbatch]
    logits = hidden_states + min(costs.links.p2p_seconds, (gradient - hidden_states) / 4)
    logits_input = logits + min(gradient - logits, 2 * interval) / 2
    loss = (logits + logits_input) / 2
    logits_weight = logits_input + interval / 2
    embedding_gradient = starts[0, Kind.BACKWARD_INPUT, microbatch] + 1

    yield Kind.BCAST_E, embeddings - interval / 2
    yield Kind.EMBEDDING, embeddings
    yield Kind.REDUCE_E, embeddings
    yield Kind.BCAST_S, hidden_states
    yield Kind.LOGITS, logits
    yield Kind.GATHER_S, logits
    yield Kind.LOSS, loss
    yield Kind.BCAST_SW, loss
    yield Kind.LOGITS_INPUT, logits_input
    yield Kind.REDUCE_SI, logits_input
    yield Kind.LOGITS_WEIGHT, logits_weight
    yield Kind.BCAST_EW, embedding_gradient
    yield Kind.EMBEDDING_WEIGHT, embedding_gradient + interval


def _places(kind: Kind, placement: Placement) -> Iterator[tuple[int, int]]:
    """Yield (rank, its first stage) for each rank that has vocabulary passes of ``kind``."""
    for rank, stages in enumerate(placement.stages_of):
        if RULES[kind].where is Where.SHARD or rank == placement.rank_of[-1]:
            yield rank, stages[0]
