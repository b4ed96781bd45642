"""Gain of ordered and dealt microbatches, on emulated clocks, compared with its prediction.

    python -m scripts.benchmarks.unequal_clocks

Each replica of four ranks runs alone; of the replicas the slowest counts. A pass sleeps for its
seconds times the relative cost of its microbatch. Each draw is a step of other microbatches: in
order of arrival, and as the flags arrange them, under a program for their places.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_ext.compile.program.unequal import UnequalSteps
from megatron_ext.compile.program.verify import Program
from megatron_ext.runtime.world import gather_from_all
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.action_arrays import Floats
from megatron_ext.schedule.dealing import MicrobatchOrder, arranged
from scripts.benchmarks.contestants import EmulatedRank, EmulatedStage
from scripts.benchmarks.emulated import EmulatedChunk
from scripts.benchmarks.harness import arguments, print_table
from scripts.benchmarks.runs import on_forked_ranks
from scripts.benchmarks.unequal import REPLICAS, _costs, _program, for_places
from scripts.benchmarks.unequal_loads import KINDS, batch

RANKS, MICROBATCHES, DRAWS, FIRST_SEED, MS = 4, 8, 5, 500, 6.0
SPECS = ("zb-h1", "v-auto")
LOADS = ("long-128k", "sft-packs")


@dataclass(frozen=True)
class Turn:
    """A step of the slowest replica, which is run on emulated clocks.

    Attributes:
        factors: by kind of pass, the cost of each microbatch over that of a mean one, in the order
            in which the replica runs them.
        predicted: simulated seconds.
    """

    program: Program
    factors: dict[Kind, Floats]
    predicted: float


class UnequalStage(EmulatedStage):
    """Emulated stage whose passes last longer or shorter by a factor of their microbatch."""

    def __init__(self, number: int, chunk: EmulatedChunk, has_loss: bool) -> None:
        super().__init__(number, chunk, has_loss)
        self._of_mean = chunk.seconds
        self.factors: dict[Kind, Floats] = {}

    def forward(self, microbatch: int, x: torch.Tensor | None) -> torch.Tensor:
        self._chunk.seconds = {
            kind: seconds * float(self.factors[kind][microbatch])
            for kind, seconds in self._of_mean.items()
            if kind in self.factors
        }
        return super().forward(microbatch, x)


def turns(spec: str, name: str) -> list[tuple[Turn, Turn]]:
    """Return two steps for each random draw of microbatches: with the microbatches in order of
    arrival, and with arranged ones."""
    fixed = _program(spec, RANKS, MICROBATCHES)
    placed = for_places(fixed, name) or fixed
    made = []
    for draw in range(DRAWS):
        costs = _costs(
            batch(name, REPLICAS * MICROBATCHES, FIRST_SEED + draw), KINDS[name].attention
        )
        forward = costs[Kind.FORWARD]
        small = arranged(forward, REPLICAS, MicrobatchOrder.SMALL_ENDS, deal=True)
        arrival = arranged(forward, REPLICAS, deal=False)
        made.append((_slowest(fixed, costs, arrival), _slowest(placed, costs, small)))
    return made


def _slowest(program: Program, costs: dict[Kind, Floats], rows: Any) -> Turn:
    under = UnequalSteps(program)
    taken = [under.makespan(costs, row[None]) for row in rows]
    row = rows[int(np.argmax(taken))]
    factors = {kind: seconds[row] for kind, seconds in costs.items()}
    return Turn(program, factors, max(taken) * MS / 1000)


def measure(made: Sequence[tuple[Turn, Turn]], repeats: int) -> list[list[float]]:
    """Return the seconds of each step of ``made``: the median of ``repeats``, taken in turns."""

    def run() -> list[list[float]]:
        step = _stepping(made[0][0].program)
        step(made[0][0])
        return [
            [float(np.median([step(turn) for _ in range(repeats)])) for turn in both]
            for both in made
        ]

    return on_forked_ranks(RANKS, run)


def _stepping(first: Program) -> Callable[[Turn], float]:
    """Return a function that runs a step.

    The function returns the seconds from the first start to the last end of all ranks.
    """
    costs = first.problem.costs
    seconds = costs.with_passes(
        seconds={kind: tuple(t * MS / 1000 for t in of) for kind, of in costs.seconds.items()}
    )
    emulated = EmulatedRank(first.schedule, seconds, UnequalStage)

    def step(turn: Turn) -> float:
        for stage in emulated.stages.values():
            assert isinstance(stage, UnequalStage)
            stage.factors = turn.factors
        dist.barrier()
        begin = time.monotonic()
        emulated.step(turn.program, splits_backward=True)
        times = gather_from_all((begin, time.monotonic()))
        return max(end for _, end in times) - min(start for start, _ in times)

    return step


def rows(loads: Sequence[str], repeats: int) -> Iterator[tuple[str, ...]]:
    for name in loads:
        for spec in SPECS:
            made = turns(spec, name)
            taken = measure(made, repeats)
            predicted = [ordered.predicted / arrival.predicted for arrival, ordered in made]
            ratios = [ordered / arrival for arrival, ordered in taken]
            errors = [100 * (took - due) for took, due in zip(ratios, predicted, strict=True)]
            yield (
                name,
                spec,
                " ".join(f"{ratio:.3f}" for ratio in predicted),
                " ".join(f"{ratio:.3f}" for ratio in ratios),
                f"{max(errors, key=abs):+.1f} points",
                f"{np.median(ratios) * 100 - np.median(predicted) * 100:+.1f} points",
            )


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(
        __doc__,
        words,
        repeats=(3, "of each step"),
        loads=(LOADS, "to draw"),
    )
    headings = ("load", "schedule", "predicted", "took", "farthest", "median")
    title = "Steps of arranged microbatches over those in order of arrival, by draw."
    print_table(headings, rows(given.loads, given.repeats), title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
