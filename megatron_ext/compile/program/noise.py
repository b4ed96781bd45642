"""Spread of a step's duration, over many samples, if the durations of passes vary.

The order of passes is fixed, as in training. Each pass takes its seconds times a random factor
whose mean is 1; messages and copies are not varied. A sample is a longest path through the
program's graph. The paths of many samples are computed together, one level of the graph after the
other.

The random generator has a fixed seed and draws for passes in the order of stage, kind and
microbatch: schedules of one placement with the same passes get the same factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_ext.compile.program.rank_times import RankTimes
from megatron_ext.compile.program.verify import Program
from megatron_ext.schedule.action_arrays import IS_PASS, ActionArrays, Floats
from megatron_ext.schedule.microbatch_costs import lognormal

SAMPLES = 1000
_QUANTILES = (0.5, 0.9)
_TIMES = 2**23  # numbers that are in memory at a time: 64 MiB of times


@dataclass(frozen=True)
class Noise:
    """Random variation of the durations of passes, by factors whose mean is 1.

    Attributes:
        passes: the standard deviation of a pass's factor, which is lognormal.
        ranks: the standard deviation of a second factor, which all passes of a rank share
            throughout a step.
        measured: measured factors; if given, the factor of a pass is drawn from them instead.
    """

    passes: float = 0.0
    ranks: float = 0.0
    measured: tuple[float, ...] = ()


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of a step's duration: the median, and the duration that nine in ten steps stay
    within."""

    median: float
    p90: float


@dataclass(frozen=True)
class Spread:
    """Quantiles of a step's duration over random samples, in the unit of the costs.

    ``--json`` prints the names of these fields.
    """

    samples: int
    makespan: Quantiles
    span: Quantiles


def spread(program: Program, noise: Noise, samples: int = SAMPLES) -> Spread:
    """Return quantiles of the step time of ``program`` over ``samples`` steps with random
    ``noise``."""
    arrays = program.as_run[0].arrays
    times = RankTimes(program)
    makespans, spans = [], []
    for factors in factors_of(arrays, noise, samples):
        starts, ends = times.of(factors)
        makespans.append(ends.max(axis=1) - starts.min(axis=1))
        spans.append((ends - starts).max(axis=1))
    return Spread(samples, _quantiles(makespans), _quantiles(spans))


def _quantiles(parts: list[Floats]) -> Quantiles:
    median, most = np.quantile(np.concatenate(parts), _QUANTILES)
    return Quantiles(float(median), float(most))


def factors_of(arrays: ActionArrays, noise: Noise, samples: int) -> Iterator[Floats]:
    """Yield random factors of all actions' durations, as arrays of shape (samples, actions).

    The samples come in batches that fit into memory; the size of a batch changes no factor.
    """
    at_once = max(_TIMES // len(arrays), 1)
    passes = arrays.numbers[IS_PASS[arrays.kind]]
    by_name = (arrays.microbatch[passes], arrays.kind[passes], arrays.stage[passes])
    passes = passes[np.lexsort(by_name)]
    of_passes, of_ranks = np.random.default_rng(0).spawn(2)
    ranks = int(arrays.rank.max()) + 1
    for first in range(0, samples, at_once):
        count = min(at_once, samples - first)
        factors = np.ones((count, len(arrays)))
        size = count, len(passes)
        if noise.measured:
            drawn = np.array(noise.measured)[of_passes.integers(len(noise.measured), size=size)]
        else:
            drawn = lognormal(of_passes, noise.passes, size)
        rank_wide = lognormal(of_ranks, noise.ranks, (count, ranks))
        factors[:, passes] = drawn * rank_wide[:, arrays.rank[passes]]
        yield factors
