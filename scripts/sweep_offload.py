"""Peaks of schedules with offload, and its effect on the makespan, by the speed of copies.

    python scripts/sweep_offload.py [--plot FILE]

Simulated at p = 8, m = 32, F = I = W. k is what a microbatch's copies to the host and back take,
as a share of its F and I (Wan et al. 2025, section 4.1).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.problem import Extras, Offload, Problem
from megatron_ext.viz.svg import save

RANKS, MICROBATCHES = 8, 32
KS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
SPECS = ("1f1b", "zb-v", "v-half", "gis:vpp=4", "gis-h:vpp=4")
LINKS = {"a link each, both ways at once": "", "two ranks share a link": ",link=2"}


@dataclass(frozen=True)
class Row:
    """``peak`` in microbatches of a rank, ``time`` over that of the schedule without offload."""

    spec: str
    offload: str
    link: str
    k: float
    peak: float
    time: float


def rows(ks: tuple[float, ...]) -> Iterator[Row]:
    for link, more in LINKS.items():
        for spec in SPECS:
            for k in ks:
                choice = choose(spec)
                placement = choice.place(RANKS)
                costs = parse_costs(f"f=1,i=1,w=1,d2h={k},h2d={k}{more}", placement)
                whole = None
                for offload in (Offload.NONE, Offload.HALF, Offload.FULL):
                    problem = Problem(
                        placement, MICROBATCHES, costs, extras=Extras(activation_offload=offload)
                    )
                    program = build_program(choice, problem)
                    makespan = simulate(program, costs).makespan
                    whole = whole or makespan
                    peak = max(peaks(program.schedule, in_microbatches(program.schedule)))
                    yield Row(spec, offload.value, link, k, peak, makespan / whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plot", type=Path, help="draw them, as .svg or .png")
    arguments = parser.parse_args()
    total = len(LINKS) * len(SPECS) * len(KS) * len(Offload)
    console = Console(stderr=True)
    results = list(track(rows(KS), "schedules", total=total, console=console, transient=True))
    if arguments.plot is not None:
        draw(results, arguments.plot)
    for link in LINKS:
        print_table(link, [row for row in results if row.link == link])


def print_table(link: str, results: list[Row]) -> None:
    """Print peaks, and times that differ from 1, by schedule and k."""
    table = Table(title=f"{link}: peak microbatches (and time, where it is longer)", box=None)
    columns = list(dict.fromkeys((row.spec, row.offload) for row in results))
    table.add_column("k")
    for spec, offload in columns:
        table.add_column(spec if offload == "none" else offload)
    for k in KS:
        here = {(row.spec, row.offload): row for row in results if row.k == k}
        cells = []
        for column in columns:
            row = here[column]
            slower = f" ({row.time:.3f}x)" if row.time > 1.0005 else ""
            cells.append(f"{row.peak:g}{slower}")
        table.add_row(f"{k:g}", *cells)
    Console(width=200).print(table)


def draw(results: list[Row], path: Path) -> None:
    """Draw peaks over k, with a panel for each sort of link."""
    from matplotlib.figure import Figure

    colours = dict(zip(SPECS, ("#000000", "#009E73", "#56B4E9", "#D55E00", "#CC79A7"), strict=True))
    styles = {"none": ":", "half": "--", "full": "-"}
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, len(LINKS), sharey=True)
    for axes, link in zip(panels, LINKS, strict=True):
        for spec in SPECS:
            for offload, style in styles.items():
                line = [r for r in results if (r.link, r.spec, r.offload) == (link, spec, offload)]
                axes.plot(
                    [row.k for row in line],
                    [row.peak for row in line],
                    style,
                    color=colours[spec],
                    clip_on=False,
                    label=f"{spec}, {offload}" if axes is panels[0] else None,
                )
        axes.set_title(link, fontsize=10)
        axes.set_xlabel("k: time of the copies / time of F and I")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("peak microbatches of a rank")
    panels[0].set_ylim(0, None)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    main()
