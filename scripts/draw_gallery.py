"""Draw the gallery: timelines of all stable schedules for three numbers of ranks, three of
microbatches and three costs, a page for each combination, and a page that shows one or two of them
side by side.

    python scripts/draw_gallery.py [--into FOLDER]

The documentation's workflow puts it into the site that it has built.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import Maturity, choose, entries
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.problem import Problem
from megatron_ext.viz.page.run import Run, simulated_run
from megatron_ext.viz.page.write import Page, write_page

SCRIPTS = Path(__file__).resolve().parent
RANKS = (4, 8, 16)
MICROBATCHES = (8, 16, 32)
COSTS = {  # costs by a word in the file's name
    "equal": "f=1,i=1,w=1",
    "usual": "f=10,i=12,w=8,comm=1",
    "vocabulary": "f=10,i=12,w=8,comm=1,output_layer=12/12/12,embedding=8/8",
}
# Largest number of passes on a page. Most of them belong to schedules that are folded when the page
# opens.
MOST_PASSES = 40_000
FIRST = ("1f1b", "zb-h1", "interleaved", "zb-v")  # schedules that are unfolded when a page opens


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    folder = SCRIPTS.parent / "build" / "site" / "gallery" / "all"
    parser.add_argument("--into", type=Path, default=folder, metavar="FOLDER")
    into = parser.parse_args(words).into
    into.mkdir(parents=True, exist_ok=True)
    (into / "index.html").write_text((SCRIPTS / "gallery.html").read_text())
    for ranks, microbatches, costs in itertools.product(RANKS, MICROBATCHES, COSTS):
        print("drawing", draw(ranks, microbatches, costs, into), flush=True)


def draw(
    ranks: int,
    microbatches: int,
    costs: str,
    into: Path,
    names: Sequence[str] | None = None,
) -> Path:
    """Write the page of the schedules ``names``, by default all stable ones. Return its path."""
    runs = tuple(runs_of(names or stable(), ranks, microbatches, COSTS[costs]))
    title = f"{ranks} ranks, {microbatches} microbatches, costs {COSTS[costs]}"
    path = into / f"p{ranks}-m{microbatches}-{costs}.html"
    command = "python scripts/draw_gallery.py"
    write_page(Page(title, runs, command, "", len(FIRST), MOST_PASSES), path)
    return path


def stable() -> tuple[str, ...]:
    """Return the names of all stable schedules, those of `FIRST` first."""
    names = [name for name, entry in entries().items() if entry.maturity is Maturity.STABLE]
    return (*FIRST, *(name for name in names if name not in FIRST))


def runs_of(names: Sequence[str], ranks: int, microbatches: int, costs: str) -> Iterator[Run]:
    """Yield a simulated step of each of ``names``, with the command that draws it alone."""
    for name in names:
        words = [name, "--pp", str(ranks), "-m", str(microbatches), "--costs", costs]
        command = shlex.join(["megatron-ext", "simulate", *words, "--html", f"{name}.html"])
        resolved = choose(name)
        placement = resolved.place(ranks)
        problem = Problem(placement, microbatches, parse_costs(costs, placement))
        yield simulated_run(name, build_program(resolved, problem), remarks=[command])


if __name__ == "__main__":
    main(sys.argv[1:])
