"""Draw the pictures of the documentation: each schedule beneath 1F1B at costs that show its point.

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

from megatron_ext.cli import app

DOCS = Path(__file__).resolve().parents[1] / "docs"
IMAGES = DOCS / "images"

EQUAL = "f=1,i=1,w=1"
USUAL = "f=10,i=12,w=8,comm=1"
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
        draw("eager-1f1b", ["--pp", "4", "-m", "8", "--costs", SLOW_MESSAGES], str(own))


def draw(name: str, options: Sequence[str], spec: str | None = None) -> None:
    """The picture of ``spec``, which is called ``name``."""
    picture = IMAGES / f"{name}.svg"
    words = ["simulate", spec or name, *options, "--plot", str(picture)]
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
