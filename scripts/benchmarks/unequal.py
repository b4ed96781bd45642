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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.unequal import UnequalSteps
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.dealing import MicrobatchOrder, arranged
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.problem import Problem
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


def _program(spec: str, ranks: int, microbatches: int) -> Program:
    """Return the program of ``spec`` for equal microbatches."""
    choice = choose(spec)
    placement = choice.place(ranks)
    limit = None if spec == "1f1b" else parse_limit("1x", ranks, microbatches)
    costs = uniform(placement, F, I, W, HOP)
    return build_program(choice, Problem(placement, microbatches, costs, limit))


def _costs(load: Load, attention: float) -> dict[Kind, Floats]:
    """Return the cost of each microbatch over that of a mean one, by kind of pass."""
    tokens, squares = load.tokens, load.squares
    backward = attention * (I + W)
    inputs = (I - backward) * tokens + backward * squares
    return {
        Kind.FORWARD: (1 - attention) * tokens + attention * squares,
        Kind.BACKWARD_INPUT: inputs / I,
        Kind.BACKWARD_WEIGHT: tokens,
        Kind.FULL_BACKWARD: (inputs + W * tokens) / (I + W),
    }


def gain(spec: str, ranks: int, microbatches: int, name: str) -> Gain:
    """Return the medians over `STEPS` steps of the kind of load ``name``."""
    steps, attention = UnequalSteps(_program(spec, ranks, microbatches)), KINDS[name].attention
    ordered, dealt = [], []
    for number in range(STEPS):
        load = batch(name, REPLICAS * microbatches, FIRST_SEED + number)
        costs = _costs(load, attention)

        def taken(order: MicrobatchOrder, deal: bool, costs: dict[Kind, Floats] = costs) -> float:
            rows = arranged(costs[Kind.FORWARD], REPLICAS, order, deal=deal)
            return steps.makespan(costs, rows)

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
