"""Lists of nodes for each node, stored in two arrays.

The graph of a step has a list of earlier nodes for each of its actions. Lists of Python's would
take most of a program's memory and build time, and numpy could not work on all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.schedule.action_arrays import Ints


@dataclass(frozen=True, eq=False)
class NodeLists:
    """A list of nodes for each node of a graph, in two numpy arrays (CSR layout).

    The list of node n is ``nodes[bounds[n] : bounds[n + 1]]``. (Python lists would take most of a
    program's memory and build time.)
    """

    bounds: NDArray[np.intp]
    nodes: Ints

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, node: int) -> list[int]:
        return self.nodes[self.bounds[node] : self.bounds[node + 1]].tolist()

    @classmethod
    def of(cls, owners: Ints, nodes: Ints, count: int) -> NodeLists:
        """Return ``count`` lists; each of ``nodes`` is in the list whose number ``owners`` gives
        for it."""
        bounds = np.zeros(count + 1, dtype=np.intp)
        np.cumsum(np.bincount(owners, minlength=count), out=bounds[1:])
        return cls(bounds, nodes[np.argsort(owners, kind="stable")])

    def joined(self, names: Ints, owners: Ints) -> tuple[Ints, Ints]:
        """Concatenate the lists of the nodes ``owners``.

        Return two arrays of equal length: for each listed node the entry of ``names`` for its
        owner, and the listed node itself.
        """
        lengths = np.diff(self.bounds)[owners]
        starts = self.bounds[owners] - (np.cumsum(lengths) - lengths)
        places = np.repeat(starts, lengths) + np.arange(lengths.sum())
        return np.repeat(names, lengths), self.nodes[places]

    @property
    def owners(self) -> Ints:
        """For each entry of ``nodes``, the node whose list contains the entry."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.bounds))

    @property
    def inverse(self) -> NodeLists:
        """The inverse lists: for each node, the nodes whose lists contain it."""
        return NodeLists.of(self.nodes, self.owners, len(self))
