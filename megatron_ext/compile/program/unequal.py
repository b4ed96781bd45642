"""Steps of unequal microbatches, under a program that was made for equal microbatches, or for the
mean cost at each place in the step.

The order of passes stays. The seconds of a pass are multiplied by the relative cost of its
microbatch; messages and copies keep their seconds. The slowest data-parallel replica decides the
time. The place of a microbatch in the step is that of its forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.base.progress import task
from megatron_ext.compile.program.rank_times import RankTimes
from megatron_ext.compile.program.verify import Program
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.action_arrays import IS_PASS, KINDS, Floats
from megatron_ext.schedule.dealing import MicrobatchOrder, arranged

PlaceCosts = dict[Kind, tuple[float, ...]]


@dataclass(frozen=True)
class UnequalMicrobatches:
    """Median makespans over several steps whose microbatches have unequal costs.

    ``--json`` prints these names.

    Attributes:
        steps: number of steps.
        replicas: number of data-parallel replicas, of which the slowest counts.
        arrival: makespan with the microbatches in order of arrival.
        ordered: makespan with each replica's microbatches in order, the largest in the middle.
        dealt: makespan with all microbatches also dealt to the replicas by cost; with one replica
            that of ``ordered``.
        profile: makespan as ``dealt``, under a program that was made for the mean costs of each
            place in a step; None without such a program.
    """

    steps: int
    replicas: int
    arrival: float
    ordered: float
    dealt: float
    profile: float | None = None

    @property
    def keeps_profile(self) -> bool:
        """Whether the program made for the mean costs of each place in a step is the faster one."""
        return self.profile is not None and self.profile < self.dealt


class UnequalSteps:
    """Times of steps of ``program`` whose microbatches have unequal costs.

    Args:
        expert_replicas: number of neighbouring data-parallel replicas that share experts: a pass
            takes as long as the longest of their passes, since they exchange tokens in every layer.
    """

    def __init__(self, program: Program, expert_replicas: int = 1) -> None:
        self._expert_replicas = expert_replicas
        arrays = program.as_run[0].arrays
        self._microbatch = arrays.microbatch // arrays.slices
        self._of_kind = {
            kind: np.flatnonzero(arrays.kind == code)
            for code, kind in enumerate(KINDS)
            if IS_PASS[code]
        }
        self._times = RankTimes(program)

    def makespan(self, costs: Mapping[Kind, Floats], rows: NDArray[np.intp]) -> float:
        """Return the makespan of the slowest data-parallel replica. Arguments are as in
        `factors`."""
        return self.slowest(self.factors(costs, rows))

    def factors(self, costs: Mapping[Kind, Floats], rows: NDArray[np.intp]) -> Floats:
        """Return factors on the seconds of actions, by data-parallel replica and action.

        Replicas that share experts have a single row.

        Args:
            costs: by kind of pass, the cost of each microbatch of the step relative to the costs
                for which the program was made; a missing kind of pass is not changed.
            rows: numbers of the microbatches of each replica, in order: a row per replica.
        """
        factors = np.ones((len(rows), len(self._microbatch)))
        for kind, of_kind in costs.items():
            passes = self._of_kind[kind]
            factors[:, passes] = of_kind[rows[:, self._microbatch[passes]]]
        return factors.reshape(-1, self._expert_replicas, factors.shape[1]).max(axis=1)

    def slowest(self, factors: Floats) -> float:
        """Return the makespan of the slowest data-parallel replica, given the result of
        `factors`."""
        starts, ends = self._times.of(factors)
        return float((ends.max(axis=1) - starts.min(axis=1)).max())


def median_makespan(program: Program, steps: Sequence[Mapping[Kind, Floats]]) -> float:
    """Return the median of the makespans of ``steps`` with unequal microbatches.

    Args:
        steps: by kind of pass, the costs of each microbatch relative to a mean one, an array of
            shape (replicas, places in the step).
    """
    under, makespans = UnequalSteps(program), []
    for costs in steps:
        rows = np.arange(next(iter(costs.values())).size).reshape(-1, program.problem.microbatches)
        makespans.append(
            under.makespan({kind: of_kind.ravel() for kind, of_kind in costs.items()}, rows)
        )
    return float(np.median(makespans))


def profile_of(costs: Mapping[Kind, Floats], replicas: int) -> PlaceCosts:
    """Return the mean costs of each place in a step, for steps whose microbatches are reordered.

    Microbatches are ordered with small ones at the ends, and dealt to the replicas. At each place
    the longest of the replicas counts, averaged over steps. The form is that of `Costs.at_places`.

    Args:
        costs: as in `with_unequal_microbatches`.
    """
    forward = costs[Kind.FORWARD]
    rows = [arranged(row, replicas, MicrobatchOrder.SMALL_ENDS, deal=True) for row in forward]

    def longest(of_kind: Floats) -> Floats:
        return np.array([row[at].max(axis=0) for row, at in zip(of_kind, rows, strict=True)])

    kinds = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    return {kind: tuple(longest(costs[kind]).mean(axis=0).tolist()) for kind in kinds}


def with_unequal_microbatches(
    program: Program,
    costs: Mapping[Kind, Floats],
    replicas: int,
    for_profile: Program | None = None,
    *,
    expert_replicas: int = 1,
) -> UnequalMicrobatches:
    """Return median makespans of steps of ``program`` whose microbatches have unequal ``costs``.

    Args:
        costs: by kind of pass, a row per step, with the costs of the microbatches of all replicas
            as the sampler counts them: the k-th of replica d is number k x replicas + d.
        for_profile: a program for the mean costs of each place in a step (`profile_of`).
        expert_replicas: as in `UnequalSteps`.
    """
    steps = UnequalSteps(program, expert_replicas)
    alternatives = [
        (steps, MicrobatchOrder.ARRIVAL, False),
        (steps, MicrobatchOrder.SMALL_ENDS, False),
        (steps, MicrobatchOrder.SMALL_ENDS, True),
    ]
    if for_profile is not None:
        alternatives.append(
            (UnequalSteps(for_profile, expert_replicas), MicrobatchOrder.SMALL_ENDS, True)
        )
    forward = costs[Kind.FORWARD]
    makespans = np.empty((len(forward), len(alternatives)))
    with task("simulating unequal microbatches", len(forward), equal_steps=True) as simulated:
        for number, row in enumerate(forward):
            of_passes = {kind: of_kind[number] for kind, of_kind in costs.items()}
            for column, (under, order, deal) in enumerate(alternatives):
                rows = arranged(row, replicas, order, deal=deal)
                makespans[number, column] = under.makespan(of_passes, rows)
            simulated.done += 1
    return UnequalMicrobatches(len(forward), replicas, *np.median(makespans, axis=0).tolist())
