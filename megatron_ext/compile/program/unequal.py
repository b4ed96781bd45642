"""Steps whose microbatches differ, under a program that was made for equal ones, or for the mean
costs of places in the step.

The order of passes stays. Passes of a microbatch take its cost times what they take by the costs;
messages and copies take what they do. Of the data-parallel replicas the slowest counts. The forward
pass of a microbatch tells its place.
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
    """Medians of makespans over several steps of unequal microbatches; ``--json`` prints these
    names.

    Attributes:
        steps: how many there were.
        replicas: data-parallel replicas, of which the slowest counts.
        arrival: with the microbatches in order of arrival.
        ordered: with those of each replica in order, the largest in the middle.
        dealt: with all of them dealt to the replicas by cost, too; that of ``ordered`` for one.
        profile: as ``dealt``, under a program that was made for the mean costs of the places; None
            if there is none.
    """

    steps: int
    replicas: int
    arrival: float
    ordered: float
    dealt: float
    profile: float | None = None

    @property
    def keeps_profile(self) -> bool:
        """Whether the program for the microbatches' places is the better one."""
        return self.profile is not None and self.profile < self.dealt


class UnequalSteps:
    """Steps of ``program`` with unequal microbatches.

    Args:
        expert_replicas: number of neighbouring data-parallel replicas that share experts: a pass
            takes as long as the longest of theirs, since they exchange tokens in every layer.
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
        """Return the makespan of the slowest replica. Arguments are those of `factors`."""
        return self.slowest(self.factors(costs, rows))

    def factors(self, costs: Mapping[Kind, Floats], rows: NDArray[np.intp]) -> Floats:
        """Return the factors of actions over their costs, by replica and action; a single row for
        replicas that share experts.

        Args:
            costs: of each microbatch of the step, over those for which the program was made, by
                kind of pass; kinds that are not in it take what they do.
            rows: numbers of the microbatches of each replica, in order: a row per replica.
        """
        factors = np.ones((len(rows), len(self._microbatch)))
        for kind, of_kind in costs.items():
            passes = self._of_kind[kind]
            factors[:, passes] = of_kind[rows[:, self._microbatch[passes]]]
        return factors.reshape(-1, self._expert_replicas, factors.shape[1]).max(axis=1)

    def slowest(self, factors: Floats) -> float:
        """Return the makespan of the slowest replica under ``factors``, a result of `factors`."""
        starts, ends = self._times.of(factors)
        return float((ends.max(axis=1) - starts.min(axis=1)).max())


def median_makespan(program: Program, steps: Sequence[Mapping[Kind, Floats]]) -> float:
    """Return the median of the makespans of ``steps`` with unequal microbatches.

    Args:
        steps: by kind of pass, the costs of each microbatch over those of a mean one, an array of
            replicas x places.
    """
    under, makespans = UnequalSteps(program), []
    for costs in steps:
        rows = np.arange(next(iter(costs.values())).size).reshape(-1, program.problem.microbatches)
        makespans.append(
            under.makespan({kind: of_kind.ravel() for kind, of_kind in costs.items()}, rows)
        )
    return float(np.median(makespans))


def profile_of(costs: Mapping[Kind, Floats], replicas: int) -> PlaceCosts:
    """Return the mean, over several steps, of the longest of the replicas at each place of a step
    whose microbatches are ordered and dealt, as `Costs.at_places`.

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
    """Return the makespans of steps of ``program`` whose microbatches cost ``costs``.

    Args:
        costs: by kind of pass, a row per step, with the costs of the microbatches of all replicas
            as the sampler counts them: the k-th of replica d is number k x replicas + d.
        for_profile: a program for the mean costs of the places (`profile_of`).
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
