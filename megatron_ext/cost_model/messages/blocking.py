"""Costs of stages whose ranks wait for each message that they send.

Megatron's schedule without virtual stages waits in this way (``send_forward_recv_backward``): a
rank in the middle of the pipeline waits twice a microbatch, at F and at the backward pass, where
the two directions overlap.
"""

from __future__ import annotations

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs


def with_blocking_messages(costs: Costs) -> Costs:
    """Return ``costs`` in which each message is a part of the pass that sends it.

    This is for a pipeline with one stage a rank whose ranks block while they send.
    """
    last = costs.stages - 1
    behind = [costs.p2p_seconds_behind(stage) for stage in range(last)]
    seconds = dict(costs.seconds)
    for kind, waits in (
        (Kind.FORWARD, [*behind, 0.0]),
        (Kind.BACKWARD_INPUT, [0.0, *behind]),
    ):
        seconds[kind] = tuple(map(sum, zip(seconds[kind], waits, strict=True)))
    return costs.with_passes(seconds=seconds).without_messages()
