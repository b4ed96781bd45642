"""How short a step can be at all, on a placement: bounds that need no search.

Microbatches are alike, so each stage may be taken to run each kind in microbatch order: the k-th
pass of a kind can always be given to microbatch k without moving it in time.
"""

from __future__ import annotations

from megatron_ext.schedule.kinds import Duty
from megatron_ext.schedule.schedule import Problem


def lower_bound(problem: Problem, splits_backward: bool) -> float:
    """No schedule on ``problem``'s placement has a smaller makespan; the memory limit is ignored.

    For each rank: nothing can run there before a microbatch arrives, all its work takes its time,
    and after its last input gradient the gradient still has to travel to the first stage, where the
    weight gradient of that microbatch comes last. W may fill the rank's end in the meantime, unless
    the backward is not split.
    """
    placement, costs, m = problem.placement, problem.costs, problem.microbatches
    forward = costs.seconds[Duty.FORWARD]
    input_gradient = costs.seconds[Duty.INPUT_GRADIENT]
    weight_gradient = costs.seconds[Duty.WEIGHT_GRADIENT]
    stages = range(placement.stages)
    hop = [costs.hop if placement.is_remote(stage, -1) else 0.0 for stage in stages]
    backward = [
        i if splits_backward else i + w
        for i, w in zip(input_gradient, weight_gradient, strict=True)
    ]
    arrival = [sum(forward[:s]) + sum(hop[: s + 1]) for s in stages]
    last_weight = weight_gradient[0] if splits_backward else 0.0
    return_trip = [sum(backward[:s]) + sum(hop[: s + 1]) + last_weight for s in stages]
    round_trip = arrival[-1] + forward[-1] + sum(backward) + sum(hop) + last_weight

    bound = round_trip
    for row in placement.stages_of:
        head = min(arrival[s] for s in row)
        work = m * sum(forward[s] + input_gradient[s] + weight_gradient[s] for s in row)
        passing = m * sum(forward[s] + backward[s] for s in row)
        bound = max(bound, head + work, head + passing + return_trip[row[0]])
    return bound
