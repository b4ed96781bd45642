"""Gain of a layout for a slow rank, on emulated clocks, compared with its prediction.

    python -m scripts.benchmarks.uneven_clocks

Four ranks run passes that sleep as long as they cost; one rank takes 1.3 times as long. 40 equal
layers are split evenly over the stages, and then as the planner splits them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_ext.compile.registry import choose
from megatron_ext.planner.layouts.given import given_work
from megatron_ext.planner.layouts.layout import Layout, even_layout
from megatron_ext.planner.layouts.work import Work, evaluate
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import line
from scripts.benchmarks.harness import arguments, print_table
from scripts.benchmarks.prediction import measure
from scripts.benchmarks.uneven import best_layout

RANKS, MICROBATCHES, LAYERS, SLOW = 4, 8, 40, 1.3
PER_LAYER = {"f": 4.0, "i": 4.8, "w": 3.2}  # milliseconds of F, I and W of a layer
SPECS = ("1f1b", "zb-h1", "zb-v")


def costs_of(spec: str, layout: Layout, slow_rank: int) -> str:
    """Return the milliseconds of each stage, in the form of ``--costs``."""
    placement = choose(spec).place(RANKS)
    slowness = [SLOW if rank == slow_rank else 1.0 for rank in placement.rank_of]
    parts = []
    for key, per_layer in PER_LAYER.items():
        stages = zip(layout.layers, slowness, strict=True)
        figures = [per_layer * count * slow for count, slow in stages]
        parts.append(f"{key}={'/'.join(f'{figure:.6g}' for figure in figures)}")
    return ",".join(parts)


def work_of(slow_rank: int) -> Work:
    of_rank = {key: LAYERS / RANKS * per_layer for key, per_layer in PER_LAYER.items()}
    text = ",".join(f"{key}={figure:g}" for key, figure in of_rank.items())
    costs = parse_costs(text, line(RANKS))
    work = given_work(costs, LAYERS, ranks=RANKS, microbatches=MICROBATCHES)
    speeds = tuple(1 / SLOW if rank == slow_rank else 1.0 for rank in range(RANKS))
    return replace(work, speeds=speeds)


def took(spec: str, layout: Layout, slow_rank: int) -> float:
    """Return the measured seconds of a step on the emulated clocks."""
    costs = costs_of(spec, layout, slow_rank)
    return measure(spec, RANKS, MICROBATCHES, costs).comparison.measured


def rows(ranks: Sequence[int]) -> Iterator[tuple[object, ...]]:
    for rank in ranks:
        work = work_of(rank)
        for spec in SPECS:
            even = even_layout(work.model, choose(spec).place(RANKS).stages)
            made = best_layout(work, spec, search=False)
            predicted = made.seconds / evaluate(work, spec, even).seconds
            measured = took(spec, made.layout, rank) / took(spec, even, rank)
            layers = " ".join(map(str, made.layout.layers))
            yield rank, spec, layers, f"{predicted:.3f}", f"{measured:.3f}"


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(__doc__, words, ranks=((0, 2, 3), "that are slow, one at a time"))
    title = "Steps with the layout over those with as many layers on each stage."
    print_table(("slow rank", "schedule", "layers", "predicted", "took"), rows(given.ranks), title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
