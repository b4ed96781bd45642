"""Lower bounds of the time of a step on a placement, without a search.

If microbatches are alike, each stage may be assumed to run each kind in microbatch order: the k-th
pass of a kind can always be given to microbatch k without moving it in time. If microbatches
differ, the bounds hold only for schedules that run each kind in microbatch order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import Neighbour
from megatron_ext.schedule.problem import Offload, Problem, Recompute
from megatron_ext.search.weight_gradient_filling import Memory, memory_of


def lower_bound(problem: Problem, splits_backward: bool) -> float:
    """Return a lower bound of a step's seconds, for all schedules on the problem's placement.

    The schedules must be within the memory limit. The seconds are the makespan, or the time of a
    step if steps overlap. A rank is idle at these times:

    - before its first I. The first microbatch has to reach it, and to come back to it from the last
      stage; until then the rank can only run F, of as many microbatches as memory holds.
    - after its last I. That gradient has to travel to the first stage, whose W comes last of all;
      the rank can only run W, of as many microbatches as memory holds (none, unless the backward is
      split).

    If steps overlap, only the idle time between a rank's own first and last pass counts.

    Even on a busy rank, each microbatch is in its memory until it has been to the last stage and
    back (`_least_held`).

    With offload or recompute the memory limit adds nothing to the bound. With slices, or with
    microbatches that differ, the bound only counts that the first microbatch has to reach each
    rank.
    """
    if problem.slices.count > 1 or problem.costs.at_places:
        return _of_differing(problem)
    placement, costs, m = problem.placement, problem.costs, problem.microbatches
    memory = _memory(problem)
    forward = costs.seconds[Kind.FORWARD]
    input_gradient = costs.seconds[Kind.BACKWARD_INPUT]
    weight_gradient = costs.seconds[Kind.BACKWARD_WEIGHT]
    stages = range(placement.stages)
    p2p_seconds = [
        costs.p2p_seconds_behind(stage - 1)
        if placement.is_remote(stage, Neighbour.PREVIOUS)
        else 0.0
        for stage in stages
    ]
    saving = [costs.fused_backward_saving_on(stage) for stage in stages]
    backward = [
        i if splits_backward else i + w - less
        for i, w, less in zip(input_gradient, weight_gradient, saving, strict=True)
    ]
    last_weight = weight_gradient[0] - saving[0] if splits_backward else 0.0

    outward_trip = sum(forward) + sum(p2p_seconds)
    # Lower bound of the time of one microbatch, which passes all stages forward and back.
    bound = outward_trip + sum(backward) + sum(p2p_seconds) + last_weight
    for rank, row in enumerate(placement.stages_of):
        first, last = row[0], row[-1]
        arrival = sum(forward[:first]) + sum(p2p_seconds[: first + 1])
        homeward_trip = sum(backward[last + 1 :]) + sum(p2p_seconds[last + 1 :])
        return_trip = sum(backward[:first]) + sum(p2p_seconds[: first + 1]) + last_weight
        ahead = _most_work(forward, Held.ACTIVATION, rank, problem, memory)
        left = 0.0
        if splits_backward:
            left = _most_work(weight_gradient, Held.WEIGHT_INPUTS, rank, problem, memory)
        work = m * sum(forward[s] + input_gradient[s] + weight_gradient[s] - saving[s] for s in row)
        idle_before = max(arrival, outward_trip + homeward_trip - ahead)
        if problem.options.steps_overlap:
            idle_before, return_trip = max(0.0, outward_trip + homeward_trip - ahead - arrival), 0.0
        bound = max(bound, idle_before + work + max(0.0, return_trip - left))
        first_pass = 0.0 if problem.options.steps_overlap else arrival
        bound = max(
            bound, first_pass + _least_held(rank, backward, problem, memory, splits_backward)
        )
    return bound


def _of_differing(problem: Problem) -> float:
    placement, part = problem.placement, problem.forwards[0]
    costs = problem.priced_costs
    arrival, arrivals = 0.0, []
    for stage in range(placement.stages):
        if placement.is_remote(stage, Neighbour.PREVIOUS):
            arrival += costs.of(Action(stage - 1, Kind.SEND_F, part))
        arrivals.append(0.0 if problem.options.steps_overlap else arrival)
        arrival += costs.of(Action(stage, Kind.FORWARD, part))
    count = problem.slices.count
    works = [problem.microbatches * costs.least_on(row, count) for row in placement.stages_of]
    return max(
        arrivals[row[0]] + work for row, work in zip(placement.stages_of, works, strict=True)
    )


def _memory(problem: Problem) -> Memory:
    """Return the memory limits of the ranks; infinite with offload or recompute, which free
    memory."""
    stays = problem.with_options(activation_offload=Offload.NONE, recompute=Recompute())
    return memory_of(problem if stays == problem else replace(stays, memory_limit=None))


def _most_work(
    seconds: tuple[float, ...], held: Held, rank: int, problem: Problem, memory: Memory
) -> float:
    """Return the most seconds of passes whose memory ``rank`` can hold at the same time.

    ``held`` is the kind of memory that each pass holds.
    """
    memory_left, most = memory.allowed[rank], 0.0
    needs = {stage: memory.amount(held, stage) for stage in problem.placement.stages_of[rank]}
    best_first = sorted(needs, key=lambda s: seconds[s] / needs[s] if needs[s] else math.inf)
    for stage in reversed(best_first):
        fit = min(memory_left / needs[stage] if needs[stage] else math.inf, problem.microbatches)
        memory_left -= fit * needs[stage]
        most += fit * seconds[stage]
    return most


def _least_held(
    rank: int, backward: Sequence[float], problem: Problem, memory: Memory, splits_backward: bool
) -> float:
    """Return a lower bound of the seconds that ``rank`` needs, from the memory that it must hold.

    A stage holds the activation of a microbatch from the start of F until the microbatch has been
    to the last stage and back, and the inputs of W until W is done. If the previous stage is on the
    same rank, as at the turn of a V, its I and this W cannot run at the same time, so one of the
    stages holds its memory for longer. Memory times seconds, summed over stages and microbatches,
    is at most the rank's limit times the seconds to be found.

    Nor can the memory of a rank be full from the start to the end. Its passes run one after the
    other: t seconds after its first start, it has started at most 1 + t/f forwards, where f is the
    shortest. Likewise, t seconds before its last end, at most 1 + t/w of the passes that free
    memory have not ended. The memory that is empty for these reasons is added, in each case for at
    most as many passes as the rank has, so that the two intervals do not overlap.
    """
    allowed, m = memory.allowed[rank], problem.microbatches
    if math.isinf(allowed):
        return 0.0
    costs, row = problem.costs, problem.placement.stages_of[rank]
    forward = costs.seconds[Kind.FORWARD]
    weight = [
        figure - costs.fused_backward_saving_on(stage) if splits_backward else 0.0
        for stage, figure in enumerate(costs.seconds[Kind.BACKWARD_WEIGHT])
    ]
    activation = {stage: memory.amount(Held.ACTIVATION, stage) for stage in row}
    held = 0.0
    for stage in row:
        rest = min(memory.amount(Held.WEIGHT_INPUTS, stage), activation[stage])
        held += activation[stage] * _there_and_back(stage, backward, problem) + rest * weight[stage]
        if stage - 1 in row:
            held += min(rest * backward[stage - 1], activation[stage - 1] * weight[stage])
    frees = weight if splits_backward else backward
    most, empty = max(map(memory.of, row)), 0.0
    passes = min(int(allowed / most), m * len(row)) if most else 0
    for shortest in (min(forward[s] for s in row), min(frees[s] for s in row)):
        empty += shortest * sum(allowed - n * most for n in range(1, passes + 1))
    return (m * held + empty) / allowed


def _there_and_back(stage: int, backward: Sequence[float], problem: Problem) -> float:
    """Return the seconds from the start of a microbatch's F on ``stage`` to the end of its I
    there."""
    placement, costs = problem.placement, problem.costs
    after = range(stage + 1, placement.stages)
    remote = [s for s in after if placement.is_remote(s, Neighbour.PREVIOUS)]
    p2p_seconds = (
        sum(costs.p2p_seconds_behind(s - 1) for s in remote)
        if costs.links.p2p_seconds_by_stage
        else costs.links.p2p_seconds * len(remote)
    )
    forward = costs.seconds[Kind.FORWARD]
    return sum(forward[stage:]) + sum(backward[stage:]) + 2 * p2p_seconds
