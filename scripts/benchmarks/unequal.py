"""Gains of ordered and dealt microbatches, simulated, over microbatches in order of arrival.

    python -m scripts.benchmarks.unequal          the whole table, two minutes
    python -m scripts.benchmarks.unequal --short  p = 4 and 8

Four data-parallel replicas; the slowest counts. A mean microbatch takes F : I : W = 10 : 12 : 8 on
each rank, of which attention has a share that grows with squared lengths, all of it in F and I; a
message takes 1. Each figure is the median of 20 drawn steps. Programs are within 1F1B's memory. The
first two figures of a cell are those of one for equal microbatches. The third is that of one made
for the mean costs of the places in 20 other steps, or the second again, with =, if that is better.
The last column is the share of the gain that is left if each pass varies by 15 %: the least of all
sizes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
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
from megatron_ext.schedule.microbatch_costs import lognormal
from megatron_ext.schedule.problem import Problem
from megatron_ext.search.for_places import program_for_places
from scripts.benchmarks.unequal_loads import KINDS, Load, batch

REPLICAS, STEPS, FIRST_SEED, PROFILE_SEED = 4, 20, 700, 3000
NOISE = 0.15  # standard deviation of what a pass takes, as a share of that
TIED = "long-128k"
F, I, W, HOP = 10.0, 12.0, 8.0, 1.0  # noqa: E741
SIZES = ((4, 8), (8, 16), (8, 32), (16, 64))
SPECS = ("1f1b", "zb-h1", "v-auto")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Gain:
    """Steps over those in order of arrival.

    Attributes:
        ordered: with each replica in order, the largest in the middle.
        dealt: with all dealt, too.
        profile: the same under a program for the places; None if there is none.
        left: the share of the largest gain that is left under `NOISE`.
    """

    ordered: float
    dealt: float
    profile: float | None
    left: float

    def __str__(self) -> str:
        figures = f"{self.ordered:.3f}, {self.dealt:.3f}"
        if self.profile is None:
            return figures
        if self.profile >= self.dealt:
            return f"{figures} ="
        return f"{figures}, {self.profile:.3f}"


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


def _steps(name: str, microbatches: int, first_seed: int) -> Iterator[dict[Kind, Floats]]:
    """Yield the costs of each of `STEPS` steps of the kind of load ``name``."""
    for number in range(STEPS):
        load = batch(name, REPLICAS * microbatches, first_seed + number)
        yield _costs(load, KINDS[name].attention)


def _rows(costs: dict[Kind, Floats], *, order: bool, deal: bool) -> NDArray[np.intp]:
    how = MicrobatchOrder.SMALL_ENDS if order else MicrobatchOrder.ARRIVAL
    return arranged(costs[Kind.FORWARD], REPLICAS, how, deal=deal)


def _longest(costs: dict[Kind, Floats], rows: NDArray[np.intp]) -> dict[Kind, Floats]:
    """Return the cost of the longest of the replicas at each place of a step."""
    return {kind: own[rows].max(axis=0) for kind, own in costs.items()}


def for_places(fixed: Program, name: str) -> Program | None:
    """Return a program for the places in steps of the kind of load ``name``; None as
    `program_for_places`."""
    longest = [
        _longest(costs, _rows(costs, order=True, deal=True))
        for costs in _steps(name, fixed.problem.microbatches, PROFILE_SEED)
    ]
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    means = {kind: np.mean([step[kind] for step in longest], axis=0) for kind in kinds}
    return program_for_places(fixed, {kind: tuple(of.tolist()) for kind, of in means.items()})


def gain(spec: str, ranks: int, microbatches: int, name: str, *, tied: bool = False) -> Gain:
    """Return the medians over `STEPS` steps of the kind of load ``name``.

    Args:
        tied: replicas share experts, so that a pass takes as long as the longest of its place.
    """
    fixed = _program(spec, ranks, microbatches)
    own = for_places(fixed, name)
    ways = [(fixed, False, False), (fixed, True, False), (fixed, True, True)]
    if own is not None:
        ways.append((own, True, True))
    under = {id(program): UnequalSteps(program) for program, _, _ in ways}
    taken = np.empty((2, STEPS, len(ways)))  # without noise, and with it
    rng = np.random.default_rng(1)
    for number, costs in enumerate(_steps(name, microbatches, FIRST_SEED)):
        for column, (program, order, deal) in enumerate(ways):
            of_all, rows = costs, _rows(costs, order=order, deal=deal)
            if tied:
                of_all, rows = _longest(costs, rows), np.arange(microbatches)[None]
            steps = under[id(program)]
            factors = steps.factors(of_all, rows)
            noise = lognormal(rng, NOISE, factors.shape)
            taken[:, number, column] = steps.slowest(factors), steps.slowest(factors * noise)
    ratios, noisy = np.median(taken[..., 1:] / taken[..., :1], axis=1)
    best = int(ratios.argmin())
    left = float((1 - noisy[best]) / (1 - ratios[best]))
    profile = None if own is None else float(ratios[2])
    return Gain(float(ratios[0]), float(ratios[1]), profile, left)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--short", action="store_true")
    sizes = SIZES[:2] if parser.parse_args(words).short else SIZES
    table = Table("load", "schedule", *(f"p={p}, m={m}" for p, m in sizes), "left")

    def add(load: str, spec: str, gains: Sequence[Gain]) -> None:
        table.add_row(load, spec, *map(str, gains), f"{min(one.left for one in gains):.0%}")

    for name in KINDS:
        for spec in SPECS:
            add(name, spec, [gain(spec, p, m, name) for p, m in sizes])
    tied = [gain("v-auto", p, m, TIED, tied=True) for p, m in sizes]
    add(f"{TIED}, experts over data-parallel ranks", "v-auto", tied)
    console = Console(width=130)
    console.print(
        "ordered, ordered and dealt, and with a program for the places: steps over those in order "
        "of arrival"
    )
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
