"""Speed of data-parallel ranks that reduce gradients and gather parameters."""

from __future__ import annotations

from megatron_ext.cost_model.execution import Framework
from megatron_ext.cost_model.rates import Rates

# Nodes of a ring in plain PyTorch that is as fast as its links; of more nodes it is slower in
# proportion. An assumption, which rests on one measured set of 32 nodes (measured.csv of
# scripts/evaluation, 30B, in view). Megatron's rings do not: with such a slowdown Llama 3 405B on
# 16,384 GPUs, a ring of 128 nodes, would take twice its published time.
FULL_SPEED_NODES = 8


def seconds_of_a_byte(
    ranks: int, stride: int, rates: Rates, framework: Framework = Framework.MEGATRON
) -> float:
    """Return the seconds for each byte that ``ranks`` ranks, ``stride`` apart, scatter or gather.

    In a ring every rank sends all but its own share to the next. The ranks of a node form as many
    rings as they are, and each ring leaves the node by another rank's port. In plain PyTorch they
    are assumed to form one ring, at the speed of one port, and slower over many nodes.
    """
    near = max(min(ranks, rates.domain // stride), 1)
    is_plain = framework is Framework.PYTORCH
    rings = 1 if is_plain else near
    within = 1 / rates.peers if near > 1 else 0.0
    slower = max(1.0, ranks / near / FULL_SPEED_NODES) if is_plain else 1.0
    between = slower / (rings * rates.network) if ranks > near else 0.0
    return (ranks - 1) / ranks * max(within, between)
