"""How short a step can be at all, on a placement: bounds that need no search.

Microbatches are alike, so each stage may be taken to run each kind in microbatch order: the k-th
pass of a kind can always be given to microbatch k without moving it in time.
"""

from __future__ import annotations

import math

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import Neighbour
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.search.weight_gradient_filling import Memory, memory_of


def lower_bound(problem: Problem, splits_backward: bool) -> float:
    """No schedule on ``problem``'s placement, within its memory limit, has a smaller makespan; nor,
    where steps overlap, a shorter step.

    A rank is idle, beside its work:

    - before its first I. The first microbatch has to reach it, and to come back to it from the last
      stage; until then there is nothing to do but F, of as many microbatches as memory holds.
    - after its last I. That gradient has to travel to the first stage, whose W comes last of all;
      the rank has nothing left to do but W, of as many microbatches as memory holds (none, unless
      the backward is split).

    Where steps overlap only what a rank idles between its own first pass and its own last counts.
    """
    placement, costs, m = problem.placement, problem.costs, problem.microbatches
    memory = memory_of(problem)
    forward = costs.seconds[Kind.FORWARD]
    input_gradient = costs.seconds[Kind.BACKWARD_INPUT]
    weight_gradient = costs.seconds[Kind.BACKWARD_WEIGHT]
    stages = range(placement.stages)
    hop = [costs.hop if placement.is_remote(stage, Neighbour.PREVIOUS) else 0.0 for stage in stages]
    spared = [costs.spared_on(stage) for stage in stages]
    backward = [
        i if splits_backward else i + w - less
        for i, w, less in zip(input_gradient, weight_gradient, spared, strict=True)
    ]
    last_weight = weight_gradient[0] - spared[0] if splits_backward else 0.0

    way_out = sum(forward) + sum(hop)
    bound = way_out + sum(backward) + sum(hop) + last_weight  # one microbatch
    for rank, row in enumerate(placement.stages_of):
        first, last = row[0], row[-1]
        arrival = sum(forward[:first]) + sum(hop[: first + 1])
        way_back = sum(backward[last + 1 :]) + sum(hop[last + 1 :])
        return_trip = sum(backward[:first]) + sum(hop[: first + 1]) + last_weight
        ahead = _most_work(forward, Held.ACTIVATION, rank, problem, memory)
        left = 0.0
        if splits_backward:
            left = _most_work(weight_gradient, Held.WEIGHT_INPUTS, rank, problem, memory)
        work = m * sum(forward[s] + input_gradient[s] + weight_gradient[s] - spared[s] for s in row)
        idle_before = max(arrival, way_out + way_back - ahead)
        if problem.extras.post_validation:
            idle_before, return_trip = max(0.0, way_out + way_back - ahead - arrival), 0.0
        bound = max(bound, idle_before + work + max(0.0, return_trip - left))
    return bound


def _most_work(
    seconds: tuple[float, ...], held: Held, rank: int, problem: Problem, memory: Memory
) -> float:
    """The most seconds of passes whose ``held`` fits into the memory of ``rank`` together."""
    room, most = memory.allowed[rank], 0.0
    needs = {stage: memory.amount(held, stage) for stage in problem.placement.stages_of[rank]}
    best_first = sorted(needs, key=lambda s: seconds[s] / needs[s] if needs[s] else math.inf)
    for stage in reversed(best_first):
        fit = min(room / needs[stage] if needs[stage] else math.inf, problem.microbatches)
        room -= fit * needs[stage]
        most += fit * seconds[stage]
    return most
