"""Seconds of collectives, as NCCL reckons them: a latency by steps, and bytes by bandwidth.

A ring of n ranks has n - 1 steps for a gather or a reduce-scatter, and twice as many for an
all-reduce (NVIDIA, NCCL, src/graph/tuning.cc, ``ncclTopoTuneModel``).
"""

from __future__ import annotations

# Seconds of NCCL's protocol for large messages: to begin, a step over NVLink, and one over the
# network (baseLat, hwLat of Ring and Simple).
BEGIN, NEAR_STEP, FAR_STEP = 8.4e-6, 3.4e-6, 14.0e-6


def ring_latency(halves: float, collectives: float, near: float, nodes: float) -> float:
    """Return the latency of ``collectives`` that are so many ``halves`` of all-reduces together.

    Args:
        near: ranks of the ring in each node.
        nodes: nodes that the ring goes through.
    """
    steps = near * nodes - 1
    far = nodes - 1
    return collectives * BEGIN + halves * ((steps - far) * NEAR_STEP + far * FAR_STEP)
