"""Order of a step's microbatches, and their deal to data-parallel replicas, by their costs.

A pipeline waits at the ends of a step; the waits are short if the first and the last microbatches
are small. If the sorted microbatches are dealt back and forth, all replicas take about as long:

    costs  9 8 7 6 5 4 3 2    to two replicas:  9 6 5 2  and  8 7 4 3
    in order, small ends:     5 9 6 2           4 8 7 3

A microbatch stays whole, and each replica gets as many as without dealing, so the loss has the same
terms.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.intp]
MicrobatchCosts = NDArray[np.float64]


class MicrobatchOrder(StrEnum):
    """Orders in which a data-parallel replica runs the microbatches of a step."""

    ARRIVAL = "arrival"
    SMALL_ENDS = "small-ends"


def small_ends(costs: MicrobatchCosts) -> Numbers:
    """Return the numbers of the microbatches in an order with the most costly in the middle.

    ``costs`` has the cost of each microbatch.
    """
    descending = np.argsort(-costs, kind="stable")
    return np.concatenate([descending[::2][::-1], descending[1::2]])


def arranged(
    costs: MicrobatchCosts,
    replicas: int,
    order: MicrobatchOrder = MicrobatchOrder.ARRIVAL,
    *,
    deal: bool,
) -> Numbers:
    """Return the numbers of the microbatches that each data-parallel replica runs, in order.

    The result has a row per replica.

    Args:
        costs: costs of all microbatches of a step, as the sampler counts them: the k-th of replica
            d is number k x replicas + d.
        deal: whether replicas exchange microbatches, so that each takes about as long.
    """
    numbers = np.arange(len(costs)).reshape(-1, replicas)
    if deal:
        numbers = np.argsort(-costs, kind="stable").reshape(-1, replicas)
        numbers[1::2] = numbers[1::2, ::-1].copy()
        # Each replica runs its microbatches in the order of their arrival.
        numbers = np.sort(numbers, axis=0)
    rows = numbers.T
    if order is MicrobatchOrder.SMALL_ENDS:
        rows = np.stack([row[small_ends(costs[row])] for row in rows])
    return np.ascontiguousarray(rows)
