"""Measure what --pipeline-metrics costs: steps with it and without it, in turn, in one run.

    python -m scripts.benchmarks.metrics
    python -m scripts.benchmarks.metrics --pp 2 -m 16 --costs f=2,i=2,w=2 --pairs 20

Ranks whose passes sleep (as in `executors`) run turns of ten steps. With metrics passes
are recorded and read, and the ranks exchange their figures once in a turn. Turns of a pair follow
one another at once, in the order on, off and off, on; the ratio is of their seconds. The
median over the pairs is printed with the spread of their middle half.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_ext.adapter.observers.metrics import StepMetrics
from megatron_ext.adapter.observers.observer import ObservedStep
from megatron_ext.adapter.training_globals import line_interval
from megatron_ext.compile.output_layer import place_output_layer
from megatron_ext.compile.registry import choose
from megatron_ext.launch import CPU_PLATFORM
from megatron_ext.logger import logger
from megatron_ext.patches.engine import apply
from megatron_ext.schedule.problem import Problem
from scripts.benchmarks.contestants import EmulatedRank
from scripts.benchmarks.costs_in_seconds import in_seconds
from scripts.benchmarks.runs import on_forked_ranks

SCHEDULES = "1f1b zb-h1 zb-v"


@dataclass(frozen=True)
class Result:
    """One schedule. ``ratio``: seconds with metrics to those without, the median of all pairs, and
    the quartiles; ``step``: seconds of a step without; ``passes``: of a rank in it."""

    schedule: str
    ratio: float
    quartiles: tuple[float, float]
    step: float
    passes: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", "-m", type=int, default=8)
    parser.add_argument("--costs", default="f=6,i=8,w=4", help="milliseconds, of a full rank")
    parser.add_argument("--schedules", default=SCHEDULES)
    parser.add_argument("--pairs", type=int, default=10)
    given = parser.parse_args(argv)
    results = [
        measure(spec, given.pp, given.microbatches, given.costs, given.pairs)
        for spec in given.schedules.split()
    ]
    table = Table(
        *("schedule", "passes", "step without, ms", "with / without", "middle half of the pairs"),
        title=f"{given.pp} ranks, {given.microbatches} microbatches, {given.costs} ms, "
        f"{given.pairs} pairs of {line_interval()} steps each",
    )
    for result in results:
        low, high = result.quartiles
        table.add_row(
            *(result.schedule, str(result.passes), f"{1e3 * result.step:.1f}"),
            *(f"{result.ratio:.4f}", f"{low:.4f} to {high:.4f}"),
        )
    Console().print(table)
    return 0


def measure(spec: str, ranks: int, microbatches: int, costs: str, pairs: int) -> Result:
    """Fork the ranks, and return the result of the first one."""
    return on_forked_ranks(ranks, lambda: _run(spec, microbatches, costs, pairs), _prepare)


def _prepare() -> None:
    platform = importlib.import_module(CPU_PLATFORM)
    apply([patch for patch in platform.patches() if patch.target.startswith("torch")])
    logger.setLevel(logging.ERROR)


def _run(spec: str, microbatches: int, text: str, pairs: int) -> Result:
    choice = choose(spec)
    placement = choice.place(dist.get_world_size())
    costs = in_seconds(text, placement)
    program = place_output_layer(choice, Problem(placement, microbatches, costs))
    emulated = EmulatedRank(program.schedule, costs)
    metrics = StepMetrics(overlap=False)
    observed = ObservedStep(emulated.world, program, emulated.recorder)

    def turn(is_on: bool) -> float:
        """Return the seconds of a turn's steps, each of which the ranks begin together."""
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(line_interval()):
            if is_on:
                metrics.begin(observed)
            emulated.step(program, choice.traits.splits_backward)
            if is_on:
                metrics.end(observed)
                emulated.recorder.end()
            dist.barrier()
        return time.perf_counter() - begin

    turn(True)  # it measures no first step, and so exchanges in the next turn
    ratios, without = [], []
    for pair in range(pairs):
        order = (True, False) if pair % 2 == 0 else (False, True)
        seconds = {is_on: turn(is_on) for is_on in order}
        ratios.append(seconds[True] / seconds[False])
        without.append(seconds[False] / line_interval())
    low, ratio, high = statistics.quantiles(ratios, n=4) if pairs > 1 else ratios * 3
    passes = len(program.schedule.compute_rows[dist.get_rank()])
    return Result(spec, ratio, (low, high), statistics.median(without), passes)


if __name__ == "__main__":
    sys.exit(main())
