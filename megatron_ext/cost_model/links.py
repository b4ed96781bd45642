"""Speed of messages between pipeline ranks by their link: within a node or between nodes.

Which links a pipeline uses follows from its ranks' distance and the number of GPUs in a node. A V
goes back over the same links, and a loop also from the last rank to the first.
"""

from __future__ import annotations

import statistics

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.rates import Rates
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.placement import Neighbour, Placement


def with_links(costs: Costs, placement: Placement, rates: Rates, ranks: int, stride: int) -> Costs:
    """Return ``costs`` with the seconds of each message between stages set by its link.

    A link is within a node or between nodes.

    Args:
        ranks: number of ranks of the launch, on all nodes.
        stride: number of ranks from one pipeline rank to the next.
    """
    remote = [s for s in range(placement.last) if placement.is_remote(s, Neighbour.NEXT)]
    # Costs stay unchanged if no stage sends messages to another rank, or if the launch has fewer
    # ranks than its pipeline needs.
    if not remote or not costs.links.message_bytes or stride < 1:
        return costs
    seconds = [costs.links.message_bytes / speed for speed in rates.to_neighbours]
    near, far = zip(seconds, rates.latencies, strict=True)
    by_stage, latencies = [0.0] * placement.last, [0.0] * placement.last
    of_pairs: dict[frozenset[int], tuple[float, float]] = {}
    for stage in remote:
        two_ranks = frozenset(placement.rank_of[stage : stage + 2])
        if two_ranks not in of_pairs:
            crosses = crosses_a_node(two_ranks, rates.ranks_of_node, placement.ranks, ranks, stride)
            of_pairs[two_ranks] = far if crosses else near
        of_one, latency = of_pairs[two_ranks]
        by_stage[stage] = costs.links.states_behind(stage) * of_one
        latencies[stage] = min(by_stage[stage], latency)
    p2p_seconds, latency = (
        statistics.fmean(figures[stage] for stage in remote) for figures in (by_stage, latencies)
    )
    costs = costs.with_links(p2p_seconds=p2p_seconds, latency=latency)
    if len({(by_stage[stage], latencies[stage]) for stage in remote}) == 1:
        return costs.with_links(p2p_seconds_by_stage=(), latencies=())
    return costs.with_links(p2p_seconds_by_stage=tuple(by_stage), latencies=tuple(latencies))


def with_links_of_span(
    costs: Costs, placement: Placement, rates: Rates, execution: Execution
) -> Costs:
    """Return ``costs`` as `with_links`, for pipeline ranks at equal distances over their span.

    The order of ranks is Megatron's default. Costs are unchanged if the span is not known.
    """
    span = execution.pipeline_span
    return with_links(costs, placement, rates, span, span // placement.ranks)


def crosses_a_node(
    two_ranks: frozenset[int], ranks_of_node: int, pipeline: int, ranks: int, stride: int
) -> bool:
    """Return whether a message between two ranks goes between nodes in some pipeline of a launch.

    ``two_ranks`` are their numbers within the pipeline.
    """
    lower, upper = min(two_ranks), max(two_ranks)
    block = pipeline * stride
    places = (
        start + inner for start in range(0, ranks, block) for inner in range(min(stride, ranks))
    )
    return any(
        (place + lower * stride) // ranks_of_node != (place + upper * stride) // ranks_of_node
        for place in places
    )
