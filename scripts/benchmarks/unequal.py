"""Gains of ordered and dealt microbatches, simulated, over microbatches in order of arrival.

    python -m scripts.benchmarks.unequal          the whole table, a minute
    python -m scripts.benchmarks.unequal --short  p = 4 and 8

Four data-parallel replicas; the slowest counts. A mean microbatch takes F : I : W = 10 : 12 : 8 on
each rank, of which attention has a share that grows with squared lengths, all of it in F and I; a
message takes 1. Each figure is the median of 20 drawn steps. The program is one for equal
microbatches, within 1F1B's memory, in all columns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.longest_paths import BatchedTimes
from megatron_ext.compile.program.pass_graph import pass_graph
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.columns import KINDS as CODES
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.dealing import MicrobatchOrder, arranged
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from scripts.benchmarks.unequal_loads import KINDS, Load, batch

REPLICAS, STEPS, FIRST_SEED = 4, 20, 700
F, I, W, HOP = 10.0, 12.0, 8.0, 1.0  # noqa: E741
SIZES = ((4, 8), (8, 16), (8, 32), (16, 64))
SPECS = ("1f1b", "zb-h1", "v-auto")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Gain:
    """Steps over those in order of arrival: with each replica in order, and with all dealt, too."""

    ordered: float
    dealt: float


class Step:
    """The program of ``spec`` for equal microbatches, timed with unequal ones."""

    def __init__(self, spec: str, ranks: int, microbatches: int) -> None:
        choice = choose(spec)
        placement = choice.place(ranks)
        limit = None if spec == "1f1b" else parse_limit("1x", ranks, microbatches)
        costs = uniform(placement, F, I, W, HOP)
        problem = Problem(placement, microbatches, costs, limit)
        passes: Schedule = build_program(choice, problem).schedule
        passes = replace(passes, rows=passes.compute_rows)
        self._chunks = placement.chunks
        self._columns = passes.columns
        graph = pass_graph(passes, costs)
        self._times = BatchedTimes(graph, graph.lags)

    def seconds(self, load: Load, attention: float, rows: NDArray[np.intp]) -> float:
        """Return the makespan of the slowest replica, whose microbatches are a row of ``rows``."""
        seconds = _seconds(load, attention)  # by kind and microbatch
        columns = self._columns
        own = rows[:, columns.microbatch]  # by replica and pass
        of_passes = np.empty(own.shape)
        for code, kind in enumerate(CODES):
            if kind in seconds:
                chosen = columns.kind == code
                of_passes[:, chosen] = seconds[kind][own[:, chosen]] / self._chunks
        times = np.ascontiguousarray(of_passes.T[self._times.order])
        self._times.run(times)
        return float(times.max())


def _seconds(load: Load, attention: float) -> dict[Kind, Floats]:
    tokens, squares = load.tokens, load.squares
    inputs = (I - attention * (I + W)) * tokens + attention * (I + W) * squares
    return {
        Kind.FORWARD: F * ((1 - attention) * tokens + attention * squares),
        Kind.BACKWARD_INPUT: inputs,
        Kind.BACKWARD_WEIGHT: W * tokens,
        Kind.FULL_BACKWARD: inputs + W * tokens,
    }


def gain(spec: str, ranks: int, microbatches: int, name: str) -> Gain:
    """Return the medians over `STEPS` steps of the kind of load ``name``."""
    step, attention = Step(spec, ranks, microbatches), KINDS[name].attention
    ordered, dealt = [], []
    for number in range(STEPS):
        load = batch(name, REPLICAS * microbatches, FIRST_SEED + number)
        costs = _seconds(load, attention)[Kind.FORWARD]

        def taken(
            order: MicrobatchOrder, deal: bool, load: Load = load, costs: Floats = costs
        ) -> float:
            rows = arranged(costs, REPLICAS, order, deal=deal)
            return step.seconds(load, attention, rows)

        today = taken(MicrobatchOrder.ARRIVAL, False)
        ordered.append(taken(MicrobatchOrder.SMALL_ENDS, False) / today)
        dealt.append(taken(MicrobatchOrder.SMALL_ENDS, True) / today)
    return Gain(float(np.median(ordered)), float(np.median(dealt)))


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--short", action="store_true")
    sizes = SIZES[:2] if parser.parse_args(words).short else SIZES
    table = Table("load", "schedule", *(f"p={p}, m={m}" for p, m in sizes))
    for name in KINDS:
        for spec in SPECS:
            gains = [gain(spec, p, m, name) for p, m in sizes]
            table.add_row(name, spec, *(f"{one.ordered:.3f}, {one.dealt:.3f}" for one in gains))
    console = Console(width=100)
    console.print("ordered, and ordered and dealt: steps over those in order of arrival")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
