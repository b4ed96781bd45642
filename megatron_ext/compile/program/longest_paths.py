"""Start times of nodes that wait for one another, for one vector of seconds or many at once.

Each node starts as soon as all that it waits for has ended. For many vectors, the nodes of one
level are timed together, level after level. The level of a node is the number of nodes on the
longest path to it, so no node waits for another one of its level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_ext.compile.program.node_lists import NodeLists
from megatron_ext.schedule.action_arrays import Floats, Ints

_Places = NDArray[np.intp]


@dataclass(frozen=True, eq=False, kw_only=True)
class Precedence:
    """Graph of numbered nodes, each of which starts after the nodes that it waits for have ended.

    Attributes:
        before: for each node, the nodes that must have ended before it can start.
        known_order: the nodes in an order with each after all it waits for, if such an order is
            known.
    """

    before: NodeLists
    known_order: Ints | None = None

    @cached_property
    def order(self) -> Ints:
        """All nodes in an order with each node after all it waits for.

        Nodes in a cyclic wait are missing.
        """
        if self.known_order is not None:
            return self.known_order
        waiting: list[int] = np.diff(self.before.bounds).tolist()
        after = self.before.inverse
        # The arrays are read as memoryview objects, since Python lists of the same numbers would
        # take as much memory as all actions.
        bounds, later = memoryview(after.bounds), memoryview(after.nodes)
        order = [node for node, count in enumerate(waiting) if not count]
        for node in order:  # the loop also reaches the nodes that it appends to this list
            for follower in later[bounds[node] : bounds[node + 1]]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    order.append(follower)
        return np.array(order, dtype=np.int32)

    @property
    def stuck(self) -> list[int]:
        """Nodes that can never start: those in a cyclic wait, and those that wait for them."""
        is_done = np.zeros(len(self.before), dtype=bool)
        is_done[self.order] = True
        return np.flatnonzero(~is_done).tolist()

    def longest_paths(
        self, seconds: Sequence[float], earliest: Sequence[float] | None = None
    ) -> tuple[list[float], list[float]]:
        """Return start and end of each node, if it starts when all it waits for has ended.

        Nodes in a cyclic wait start at their earliest time and end at 0.

        Args:
            seconds: duration of each node. (Any unit of time; whole numbers stay whole.)
            earliest: earliest start of each node; 0 if not given.
        """
        zeros: list[float] = [0] * len(self.before)
        starts, ends = list(earliest or zeros), zeros
        bounds, before = memoryview(self.before.bounds), memoryview(self.before.nodes)
        for node in memoryview(self.order):
            start = starts[node]
            for earlier in before[bounds[node] : bounds[node + 1]]:
                if ends[earlier] > start:
                    start = ends[earlier]
            starts[node] = start
            ends[node] = start + seconds[node]
        return starts, ends


class BatchedTimes:
    """End times of a graph's nodes for many vectors of durations, computed together.

    Attributes:
        order: the nodes by level; within a level, the nodes that wait for most come first.
        place: the position of each node in ``order``.

    Args:
        graph: a graph without cycles.
        lags: for each of ``graph.before.nodes``, the delay from its end until the node that waits
            for it may start; None: no delays.
    """

    def __init__(self, graph: Precedence, lags: Floats | None = None) -> None:
        assert not graph.stuck, "a deadlock"
        before, waits_for = graph.before, np.diff(graph.before.bounds)
        levels, _ = graph.longest_paths([1] * len(before))
        level = np.array(levels, dtype=np.int32)
        self.order = np.lexsort((-waits_for, level))
        self.place = np.empty_like(self.order)
        self.place[self.order] = np.arange(len(level))
        bounds = np.searchsorted(level[self.order], np.arange(1, level.max() + 2))
        # For each level (depth in the graph) after the first: the level's first position and its
        # end, and arrays of the positions that its nodes wait for, with lags if there are any. The
        # n-th array has the n-th dependency of all nodes with at least n dependencies.
        self._levels: list[tuple[int, int, list[tuple[_Places, Floats | None]]]] = [
            (first, last, []) for first, last in pairwise(bounds.tolist())
        ]
        counts, starts = waits_for[self.order], before.bounds[self.order]
        for turn in range(counts.max()):
            nodes = np.flatnonzero(counts > turn)
            at = starts[nodes] + turn
            places = self.place[before.nodes[at]]
            late = np.zeros((len(at), 1)) if lags is None else lags[at, None]
            upto = np.searchsorted(nodes, bounds)
            late_upto = np.append(0, np.cumsum(late > 0))[upto]
            parts = pairwise(zip(upto.tolist(), late_upto.tolist(), strict=True))
            for (*_, turns), ((begin, few), (end, many)) in zip(self._levels, parts, strict=True):
                if begin < end:
                    turns.append((places[begin:end], late[begin:end] if few < many else None))

    def run(self, times: Floats) -> None:
        """Replace the durations of nodes in ``times`` by the times at which the nodes end.

        Args:
            times: array of shape (positions of nodes in ``order``, vectors).
        """
        for first, last, ((earlier, late), *others) in self._levels:
            latest = times.take(earlier, axis=0)
            if late is not None:
                latest += late
            for earlier, late in others:
                ready, some = times.take(earlier, axis=0), latest[: len(earlier)]
                if late is not None:
                    ready += late
                np.maximum(some, ready, out=some)
            times[first:last] += latest
