"""Start and end of each rank in many samples of a step whose passes take different times.

Samples differ by the factors of their passes; a factor of 1 leaves a pass as the costs have it.
"""

from __future__ import annotations

import numpy as np

from megatron_ext.compile.program.longest_paths import BatchedTimes
from megatron_ext.compile.program.simulate import links_of, seconds_of, take_turns
from megatron_ext.compile.program.verify import Program
from megatron_ext.schedule.action_arrays import IS_PASS, Floats


class RankTimes:
    """Computes when each rank starts and ends in samples of a step of ``program``.

    In a sample the passes take longer or shorter than in the program's own costs.
    """

    def __init__(self, program: Program) -> None:
        schedule, self._graph = program.as_run
        costs = program.problem.costs.alike
        self._seconds = np.array(seconds_of(self._graph, schedule, costs))
        self._links = links_of(self._graph, costs)
        self._times = None if self._links else BatchedTimes(self._graph)
        arrays = schedule.arrays
        passes = arrays.numbers[IS_PASS[arrays.kind]]
        _, self._first = np.unique(arrays.rank[passes], return_index=True)
        self._last = np.append(self._first[1:], len(passes)) - 1
        self._passes = passes

    def of(self, factors: Floats) -> tuple[Floats, Floats]:
        """Return, for each sample and rank, the start of the first pass and the end of the last.

        Args:
            factors: factors on the seconds of each action, of shape (samples, actions).
        """
        seconds = self._seconds * factors
        first, last = self._passes[self._first], self._passes[self._last]
        starting = seconds[:, first]
        # With random times a link's order of messages depends on the sample.
        if self._times is None:
            zeros = [0.0] * seconds.shape[1]
            runs = (take_turns(self._graph, row, self._links, zeros) for row in seconds.tolist())
            ends = np.array([end for _, end in runs])
            return ends[:, first] - starting, ends[:, last]
        place, times = self._times.place, np.ascontiguousarray(seconds.T[self._times.order])
        self._times.run(times)
        return times[place[first]].T - starting, times[place[last]].T
