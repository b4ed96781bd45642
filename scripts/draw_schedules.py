"""Draw the pictures of the documentation: each schedule beneath 1F1B at costs that show its point,
two steps that overlap beneath two that do not, and all schedules by time and memory.

Run from anywhere, with .venv/bin/python; each picture's command is printed. Two runs write the same
bytes, so that a picture changes when its schedule does.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from megatron_ext.cli import app
from megatron_ext.schedule.estimate import GPU, ModelDimensions, estimate
from megatron_ext.schedule.registry import choose
from megatron_ext.schedule.report import report
from megatron_ext.schedule.schedule import Problem, VocabularyParallel

DOCS = Path(__file__).resolve().parents[1] / "docs"
IMAGES = DOCS / "images"

EQUAL = "f=1,i=1,w=1"
USUAL = "f=10,i=12,w=8,comm=1"
HEAVY_HEAD = "f=10,i=12,w=8,comm=1,head=12/12/12,embedding=8/8"
SLOW_MESSAGES = "f=10,i=12,w=8,comm=5"

# Name: ranks, microbatches, costs and more. Few microbatches: a picture grows by every pass.
PICTURES: dict[str, tuple[int, int, str, tuple[str, ...]]] = {
    "gpipe": (4, 8, USUAL, ()),
    "2bp": (4, 8, USUAL, ()),
    "zb-h1": (4, 8, USUAL, ()),
    "zb-h2": (4, 8, EQUAL, ()),
    "zb-auto": (4, 8, USUAL, ("--memory-limit", "6")),
    "zb-1p": (4, 8, "f=10,i=12,w=8,comm=10", ()),
    "zb-2p": (4, 8, USUAL, ()),
    "interleaved": (4, 8, USUAL, ()),
    "breadth-first": (4, 8, USUAL, ()),
    "interleaved-zb": (4, 8, EQUAL, ()),
    "gis": (4, 8, USUAL, ()),
    "gis-h": (4, 8, USUAL, ()),
    "zb-v": (4, 8, EQUAL, ()),
    "v-half": (4, 8, EQUAL, ()),
    "v-min": (4, 8, USUAL, ()),
    "1f1b-v": (4, 8, USUAL, ()),
    "dualpipe-v": (4, 8, EQUAL, ()),
    "v-auto": (4, 8, USUAL, ("--memory-limit", "2")),
    "hanayo": (4, 4, USUAL, ()),
}


def main() -> None:
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # the date in a picture
    matplotlib.rcParams["svg.hashsalt"] = "megatron_ext"  # the names of its parts
    page = (DOCS / "your-own-schedule.md").read_text()
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "my_schedule.py"  # the page's first example
        own.write_text(page.split("```python\n")[1].split("```")[0])
        for name, (ranks, microbatches, costs, more) in PICTURES.items():
            draw(name, ["--pp", str(ranks), "-m", str(microbatches), "--costs", costs, *more])
        for how in ("1", "2"):
            options = ["--pp", "4", "-m", "6", "--costs", HEAVY_HEAD, "--vocab-parallel", how]
            draw(f"vocabulary-{how}", options, "1f1b")
        options = ["--pp", "4", "-m", "8", "--costs", USUAL, "--post-validation", "--steps", "2"]
        draw("post_validation", options, "zb-2p")
        draw("eager-1f1b", ["--pp", "4", "-m", "8", "--costs", SLOW_MESSAGES], str(own))
    plot(["plan", "--pp", "8", "-m", "32", "--costs", USUAL], "plan")
    draw_vocabulary_sizes()


def draw_vocabulary_sizes() -> None:
    """How busy the ranks are, by vocabulary: a GPT of 4 billion parameters as in Yeung et al. 2024,
    section 6, estimated."""
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
        print("drawing", name, flush=True)
        busy = [100 * share_of_work(spec, layers, size, how) for size in sizes]
        style = ":" if how is VocabularyParallel.NONE else "-"
        colour = "#0072B2" if spec == "zb-v" else "#D55E00"
        marker = "ov^sox"[list(lines).index(name)]
        axes.plot(sizes, busy, marker=marker, linestyle=style, color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size // 1024}k" for size in sizes])
    axes.set_ylim(0, 100)
    axes.set_xlabel("vocabulary")
    axes.set_ylabel("% of the step that ranks work")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False)
    picture = IMAGES / "vocabulary-sizes.svg"
    figure.savefig(picture)
    picture.write_text(smaller(picture.read_text()))


def share_of_work(
    spec: str, layers: Sequence[int], vocabulary: int, how: VocabularyParallel
) -> float:
    """The share of a step of 128 microbatches in which a rank works, on average over 8 ranks."""
    model = ModelDimensions(
        layers=layers,
        hidden=3072,
        ffn_hidden=4 * 3072,
        query_width=3072,
        key_value_width=3072,
        gated=False,
        heads=24,
        sequence=2048,
        micro_batch=1,
        vocabulary=vocabulary,
    )
    choice = choose(spec)
    problem = Problem(choice.place(8), 128, estimate(model, GPU), vocabulary=how)
    return 1 - float(report(choice, problem)[1]["bubble_share_makespan"])


def draw(name: str, options: Sequence[str], spec: str | None = None) -> None:
    """The picture of ``spec``, which is called ``name``."""
    plot(["simulate", spec or name, *options], name)


def plot(command: Sequence[str], name: str) -> None:
    """The picture that ``command`` draws, called ``name``."""
    picture = IMAGES / f"{name}.svg"
    words = [*command, "--plot", str(picture)]
    print("megatron-ext", *words, flush=True)
    with redirect_stdout(io.StringIO()):
        app([*words, "--json"], standalone_mode=False)
    picture.write_text(smaller(picture.read_text()))


def smaller(svg: str) -> str:
    """``svg`` without comments and indentation, to a hundredth of a point."""
    svg = re.sub(r"(?m)^ *(<!--.*-->\n)?", "", svg)
    return re.sub(r"([1-9]\d*\.\d\d)\d+", r"\1", svg)  # scales are below one


if __name__ == "__main__":
    main()
