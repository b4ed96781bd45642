"""Measured costs by the microbatch's place in the step, if microbatches are ordered by cost.

If microbatches are ordered, the k-th of every step costs about the same. A program for these places
needs their costs relative to the median pass, as the slowest pipeline has them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.action_arrays import Floats
from megatron_ext.schedule.timeline import Event


@dataclass(frozen=True)
class RankPlaces:
    """Measured seconds of a rank's passes by the microbatch's place in the step.

    Attributes:
        pipeline: global rank of the first rank of its pipeline.
        seconds: by kind of pass, of all stages of the rank together; a row per step, a number per
            microbatch.
    """

    pipeline: int
    seconds: Mapping[Kind, tuple[tuple[float, ...], ...]]


@dataclass(frozen=True)
class MeasuredPlaces:
    """Measured costs of each microbatch's place in the step, relative to the median pass of a kind.

    Attributes:
        steps: by kind of pass, an array of pipelines x microbatches for each step.
    """

    steps: tuple[Mapping[Kind, Floats], ...]

    @property
    def at_places(self) -> dict[Kind, tuple[float, ...]]:
        """Mean cost over steps of each microbatch's place in the step (`Costs.at_places`).

        At each place of each step the slowest pipeline counts.
        """
        return {
            kind: tuple(np.mean([step[kind].max(axis=0) for step in self.steps], axis=0).tolist())
            for kind in self.steps[0]
        }


def seconds_by_place(
    steps: Sequence[Iterable[Event]], microbatches: int
) -> dict[Kind, tuple[tuple[float, ...], ...]]:
    """Return a rank's seconds by kind of pass, for each step and microbatch (`RankPlaces.seconds`).

    ``steps`` are events of whole microbatches, not of slices.
    """
    tables: dict[Kind, Floats] = defaultdict(lambda: np.zeros((len(steps), microbatches)))
    for number, events in enumerate(steps):
        for event in events:
            tables[event.action.kind][number, event.action.microbatch] += event.end - event.start
    return {kind: tuple(map(tuple, table.tolist())) for kind, table in tables.items()}


def measured_places(ranks: Sequence[RankPlaces]) -> MeasuredPlaces | None:
    """Return the costs of microbatches' places in the step, as all ``ranks`` have measured them.

    None if their pipelines have different numbers of microbatches or different kinds of passes.
    """
    if len({(kind, np.shape(of)) for rank in ranks for kind, of in rank.seconds.items()}) != len(
        ranks[0].seconds
    ):
        return None
    pipelines = sorted({rank.pipeline for rank in ranks})
    tables = {}
    for kind in ranks[0].seconds:
        sums = [
            np.sum([rank.seconds[kind] for rank in ranks if rank.pipeline == pipeline], axis=0)
            for pipeline in pipelines
        ]
        of_kind = np.stack(sums, axis=1)  # shape: steps x pipelines x microbatches
        tables[kind] = of_kind / (np.median(of_kind) or 1.0)
    steps = len(next(iter(tables.values())))
    return MeasuredPlaces(
        tuple({kind: table[step] for kind, table in tables.items()} for step in range(steps))
    )
