"""Draw the pictures of the documentation: each schedule beneath 1F1B at costs that show its point,
two steps that overlap beneath two that do not, all schedules by time and memory, and measurements.

    python scripts/draw_images.py [NAME ...] [--into FOLDER]

Draws all, or those that are named. Two runs write the same bytes, so a picture changes only when
what it shows does. Nothing is measured: bars come from the table of docs/measurements.md.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from megatron_ext.cli import app
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.compile.report import report
from megatron_ext.compile.two_copies.fold import unfolded
from megatron_ext.config import OVERLAP
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.gpus import GPU
from megatron_ext.cost_model.model import stages_of
from megatron_ext.cost_model.short_form import Described
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.problem import Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.viz.draw import draw
from megatron_ext.viz.svg import save

DOCS = Path(__file__).resolve().parents[1] / "docs"

EQUAL = "f=1,i=1,w=1"
USUAL = "f=10,i=12,w=8,comm=1"
HEAVY_HEAD = "f=10,i=12,w=8,comm=1,output_layer=12/12/12,embedding=8/8"
SLOW_MESSAGES = "f=10,i=12,w=8,comm=5"

# Settings of a picture by its name: ranks, microbatches, costs and more. Microbatches are few, as a
# picture grows with every pass.
FAMILIES: dict[str, tuple[int, int, str, tuple[str, ...]]] = {
    "gpipe": (4, 8, USUAL, ()),
    "2bp": (4, 8, USUAL, ()),
    "zb-h1": (4, 8, USUAL, ()),
    "zb-h2": (4, 8, EQUAL, ()),
    "zb-auto": (4, 8, USUAL, ("--memory-limit", "6")),
    "zb-1p": (4, 8, "f=10,i=12,w=8,comm=10", ()),
    "zb-2p": (4, 8, USUAL, ()),
    "interleaved": (4, 8, USUAL, ()),
    "breadth-first": (4, 8, USUAL, ()),
    "units": (4, 8, USUAL, ()),
    "interleaved-zb": (4, 8, EQUAL, ()),
    "gis": (4, 8, USUAL, ()),
    "gis-h": (4, 8, USUAL, ()),
    "zb-v": (4, 8, EQUAL, ()),
    "v-half": (4, 8, EQUAL, ()),
    "v-min": (4, 8, USUAL, ()),
    "1f1b-v": (4, 8, USUAL, ()),
    "dualpipe-v": (4, 8, EQUAL, ()),
    "v-auto": (4, 8, USUAL, ("--memory-limit", "2")),
    "chimera": (4, 8, USUAL, ()),
    "hanayo": (4, 4, USUAL, ()),
    "bitpipe": (4, 8, USUAL, ()),
    "loop-auto:vpp=3": (4, 8, USUAL, ("--memory-limit", "3")),
    "wave-auto": (4, 8, USUAL, ("--memory-limit", "3")),
}


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    with tempfile.TemporaryDirectory() as folder:
        schedule_file = Path(folder) / "my_schedule.py"
        schedule_file.write_text(block("your-own-schedule.md", "```python\n", "```"))
        drawn = pictures(schedule_file)
        parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(drawn))
        parser.add_argument("--into", type=Path, default=DOCS / "images", metavar="FOLDER")
        arguments = parser.parse_args(words)
        if unknown := set(arguments.names) - drawn.keys():
            parser.error(f"no pictures: {', '.join(sorted(unknown))}; there are {', '.join(drawn)}")
        for name in arguments.names or drawn:
            path = arguments.into / f"{name}.svg"
            print("drawing", path, flush=True)
            drawn[name](path)


def pictures(schedule_file: Path) -> dict[str, Callable[[Path], None]]:
    """Return, by the name of each picture, the function that draws it into a file.

    Args:
        schedule_file: the example of a schedule that readers write themselves.
    """
    commands = {}
    for name, (ranks, microbatches, costs, more) in FAMILIES.items():
        problem = ["--pp", str(ranks), "-m", str(microbatches), "--costs", costs, *more]
        commands[name.partition(":")[0]] = ["simulate", name, *problem]
    line = ["--pp", "4", "-m", "8", "--costs"]
    for variant in ("1", "2"):
        heavy = ["--pp", "4", "-m", "6", "--costs", HEAVY_HEAD]
        commands[f"vocabulary-{variant}"] = [
            "simulate",
            "1f1b",
            *heavy,
            "--vocab-parallel",
            variant,
        ]
    two_steps = ["--post-validation", "--steps", "2"]
    commands["post_validation"] = ["simulate", "zb-2p", *line, USUAL, *two_steps]
    commands["eager-1f1b"] = ["simulate", str(schedule_file), *line, SLOW_MESSAGES]
    of_slices = ["--slices", "4", "--slice-lengths", "balanced"]
    cut = ["--pp", "4", "-m", "4", "--costs", "f=1,i=1,w=1,attention=0.3"]
    commands["slices"] = ["simulate", "zb-h1", *cut, *of_slices]
    paired = [OVERLAP, "--costs", "f=10,i=12,w=8,comm=0.2,overlap_saving=5"]
    commands["pairs"] = ["simulate", "dualpipe-v", "--pp", "4", "-m", "10", *paired]
    commands["plan"] = ["plan", "pp=8,m=32", "--costs", USUAL]
    plans = re.findall(r"^\$ megatron-ext (plan (?:.*\\\n)*.*)", read("planning.md"), re.M)
    of_a_model = next(words for words in plans if "heads=" in words)
    commands["planning"] = shlex.split(of_a_model.replace("\\\n", ""))
    return {
        **{name: partial(plot, command) for name, command in commands.items()},
        "two-copies": draw_two_copies,
        "vocabulary-sizes": draw_vocabulary_sizes,
        "bench": draw_bench,
    }


def block(page: str, before: str, after: str) -> str:
    """Return the text on ``page`` between the first ``before`` and the next ``after``."""
    return read(page).split(before)[1].split(after)[0]


def read(page: str) -> str:
    return (DOCS / page).read_text()


def plot(command: Sequence[str], path: Path) -> None:
    """Draw the picture that the megatron-ext ``command`` makes."""
    with redirect_stdout(io.StringIO()):
        app([*command, "--plot", str(path), "--json"], standalone_mode=False)


def draw_two_copies(path: Path) -> None:
    """Draw Chimera as it was published, with two copies of the model, above our folded form."""
    resolved = choose("chimera")
    placement = resolved.place(4)
    problem = Problem(placement, 4, parse_costs("f=2,i=2,w=2", placement))
    folded = simulate(build_program(resolved, problem), problem.costs)
    draw([unfolded(folded), folded], path)


def draw_bench(path: Path) -> None:
    """Draw the measured and ideal seconds of executors, from a table of docs/measurements.md."""
    table = block("measurements.md", "## Executors on emulated clocks", "](images/bench.svg)")
    rows = re.findall(r"^\| (\S+ \S+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) % ", table, re.MULTILINE)
    names = [f"{name} ({share}%)" for name, _, _, share in rows]
    figure = Figure(figsize=(8, 0.3 * len(names) + 1), layout="constrained")
    axes = figure.subplots()
    for label, color, column in (("measured", "#E69F00", 2), ("ideal", "#56B4E9", 1)):
        seconds = [float(row[column]) for row in rows]
        axes.barh(range(len(names)), seconds, color=color, label=label, clip_on=False)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    save(figure, path)


def draw_vocabulary_sizes(path: Path) -> None:
    """Draw which share of a step the ranks work, by vocabulary size.

    It is estimated for a GPT of 4 billion parameters, as in section 6 of Yeung et al. 2024.
    """
    sizes = [2**k * 1024 for k in (5, 6, 7, 8)]
    line, v = (4,) * 8, (2,) * 16  # layers of each stage
    lines: dict[str, tuple[str, tuple[int, ...], VocabularyParallel]] = {
        "1f1b": ("1f1b", line, VocabularyParallel.NONE),
        "1f1b, a layer less on the last stage": ("1f1b", (*line[:-1], 3), VocabularyParallel.NONE),
        "1f1b, vocabulary 1": ("1f1b", line, VocabularyParallel.ONE),
        "1f1b, vocabulary 2": ("1f1b", line, VocabularyParallel.TWO),
        "zb-v": ("zb-v", v, VocabularyParallel.NONE),
        "zb-v, vocabulary 2": ("zb-v", v, VocabularyParallel.TWO),
    }
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, (spec, layers, how) in lines.items():
        busy = [100 * share_of_work(spec, layers, size, how) for size in sizes]
        style = ":" if how is VocabularyParallel.NONE else "-"
        colour = "#0072B2" if spec == "zb-v" else "#D55E00"
        marker = "ov^sox"[list(lines).index(name)]
        axes.plot(
            sizes, busy, marker=marker, linestyle=style, color=colour, label=name, clip_on=False
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size // 1024}k" for size in sizes])
    axes.set_ylim(0, 100)
    axes.set_xlabel("vocabulary")
    axes.set_ylabel("% of the step that ranks work")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    save(figure, path)


def share_of_work(
    spec: str, layers: Sequence[int], vocabulary: int, how: VocabularyParallel
) -> float:
    """Return the share of a step of 128 microbatches in which a rank works: the mean of 8 ranks."""
    gpt = Described(sum(layers), hidden=3072, heads=24, sequence=2048, vocabulary=vocabulary)
    resolved = choose(spec)
    costs = estimate(gpt.model, stages_of(gpt.model, layers), gpt.execution(), GPU)
    problem = Problem(resolved.place(8), 128, costs, options=ScheduleOptions(vocab_parallel=how))
    return 1 - report(resolved, problem)[1].bubble_share_makespan


if __name__ == "__main__":
    main(sys.argv[1:])
