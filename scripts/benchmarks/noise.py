"""Cost of noise for each schedule: steps whose passes vary, compared with the planned step.

    python -m scripts.benchmarks.noise
    python -m scripts.benchmarks.noise --pp 4 -m 16 --noise 0.1,ranks=0.05 --schedules v-auto@3

Passes vary as with `megatron-ext simulate --noise`, and their order is fixed, as in training.
Schedules that Megatron has itself wait for messages as Megatron does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.noise import Quantiles, spread
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.planner.stock import run_by_stock
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.stock_executor import STOCK_EXECUTOR
from megatron_ext.viz.noise_text import parse_noise

# With the memory limits within which v-auto searches.
SCHEDULES: tuple[tuple[str, str | None], ...] = (
    ("1f1b", None),
    ("interleaved", None),
    ("zb-h1", None),
    ("zb-h2", None),
    ("interleaved-zb", None),
    ("v-half", None),
    ("zb-v", None),
    ("v-auto", "5"),
    ("v-auto", "6"),
    ("v-auto", "8"),
)
NOISES = ("0.02", "0.05", "0.1", "0.2", "0,ranks=0.05", "0.1,ranks=0.05")
SAMPLES = 200


@dataclass(frozen=True)
class Row:
    """Makespans in the unit of the costs, without and with noise."""

    schedule: str
    noise: str
    planned: float
    noisy: Quantiles


def rows(
    schedules: Sequence[tuple[str, str | None]],
    noises: Sequence[str],
    ranks: int,
    microbatches: int,
    costs: str,
    samples: int,
) -> Iterator[Row]:
    for spec, limit in schedules:
        choice = choose(spec)
        placement = choice.place(ranks)
        within = None if limit is None else parse_limit(limit, ranks, microbatches)
        problem = Problem(placement, microbatches, parse_costs(costs, placement), within)
        program = build_program(choice, run_by_stock(problem, spec, STOCK_EXECUTOR))
        name = spec if limit is None else f"{spec}, limit {limit}"
        planned = simulate(program, program.problem.costs).makespan
        for text in noises:
            yield Row(name, text, planned, spread(program, parse_noise(text), samples).makespan)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("-m", "--microbatches", type=int, default=32)
    parser.add_argument("--costs", default="f=10,i=12,w=8,comm=1")
    parser.add_argument("--noise", nargs="+", default=NOISES, help="as of simulate --noise")
    parser.add_argument(
        "--schedules", nargs="+", help="NAME or NAME@LIMIT, by default some at their limits"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES)
    given = parser.parse_args(words)
    schedules = SCHEDULES
    if given.schedules:
        parts = (name.partition("@") for name in given.schedules)
        schedules = tuple((name, limit or None) for name, _, limit in parts)
    made = rows(schedules, given.noise, given.pp, given.microbatches, given.costs, given.samples)
    console = Console(stderr=True)
    total = len(schedules) * len(given.noise)
    found = list(track(made, "simulating", total=total, console=console, transient=True))
    _print(found)
    return 0


def _print(found: Sequence[Row]) -> None:
    table = Table("schedule", "noise", "planned", "median", "90%", box=None)
    for row in found:
        figures = (row.noisy.median, row.noisy.p90)
        more = (f"{figure / row.planned - 1:+.1%}" for figure in figures)
        table.add_row(row.schedule, row.noise, f"{row.planned:.6g}", *more)
    Console(width=120).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
