"""Seconds of collectives by NCCL's own model: a latency for each step, and bytes over bandwidth.

In a ring of n ranks a gather or a reduce-scatter has n - 1 steps, and an all-reduce has twice as
many (NVIDIA, NCCL, src/graph/tuning.cc, ``ncclTopoTuneModel``).
"""

from __future__ import annotations

# Seconds that NCCL's protocol for large messages takes: to begin, for a step over NVLink, and for a
# step over the network (baseLat and hwLat of Ring and Simple in NCCL's tuning).
BEGIN, NEAR_STEP, FAR_STEP = 8.4e-6, 3.4e-6, 14.0e-6


def ring_latency(ring_passes: float, collectives: float, near: float, nodes: float) -> float:
    """Return the seconds of latency that ``collectives`` collectives around a ring take.

    Args:
        ring_passes: passes around the ring in all: one for a gather or a reduce-scatter, two for an
            all-reduce.
        near: ranks of the ring in each node.
        nodes: nodes that the ring goes through.
    """
    steps = near * nodes - 1
    far = nodes - 1
    return collectives * BEGIN + ring_passes * ((steps - far) * NEAR_STEP + far * FAR_STEP)
