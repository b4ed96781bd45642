"""Speed of data-parallel ranks that reduce gradients and gather parameters, over the links that lie
between them."""

from __future__ import annotations

from megatron_ext.cost_model.execution import Framework
from megatron_ext.cost_model.rates import Rates

# Largest number of nodes of a ring in plain PyTorch that runs at the speed of its links; a ring of
# more nodes is slower in proportion. This is an assumption about one cluster, whose switches are
# not published: its 13B models on 4 nodes run at the speed of the links, its 30B models on 8, 16
# and 32 nodes slower (measured.csv of scripts/evaluation). The measured order of that cluster's
# configurations is no test of the number, which was chosen by it: of 243 pairs that differ by more
# than 2 %, 227 are predicted in the right order with the number and 210 without it. Megatron's
# rings do not slow down: otherwise Llama 3 405B on 16,384 GPUs, a ring of 128 nodes, would take
# several times its published time.
FULL_SPEED_NODES = 4


def seconds_of_a_byte(
    ranks: int, stride: int, rates: Rates, framework: Framework = Framework.MEGATRON
) -> float:
    """Return the seconds for each byte that data-parallel ranks scatter or gather in rings.

    ``ranks`` ranks take part, ``stride`` apart. In a ring every rank sends all but its own share to
    the next. A node with n of the ranks has n rings, and each ring leaves the node by another
    rank's port. In plain PyTorch rings over many nodes are slower.
    """
    near = max(min(ranks, rates.domain // stride), 1)
    within = 1 / rates.peers if near > 1 else 0.0
    is_plain = framework is Framework.PYTORCH
    slower = max(1.0, ranks / near / FULL_SPEED_NODES) if is_plain else 1.0
    between = slower / (near * rates.network) if ranks > near else 0.0
    return (ranks - 1) / ranks * max(within, between)
