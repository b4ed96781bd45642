"""How far predicted steps are from published ones, and whether they have the measured order.

python -m scripts.evaluation            prints the tables, two minutes
python -m scripts.evaluation --write    writes them into docs/estimated-costs.md
python -m scripts.evaluation --json FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from scripts.evaluation.bars import BARS
from scripts.evaluation.measured import MEASURED, read_measured
from scripts.evaluation.page import text_of, write
from scripts.evaluation.spreads import measured_errors
from scripts.evaluation.stage_times import read_stages
from scripts.evaluation.tables import OTHER_PARTS, as_data, evaluate_all


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--csv", type=Path, default=MEASURED, help="File of published steps.")
    parser.add_argument("--json", type=Path, help="File to write all figures to, row by row.")
    parser.add_argument("--write", action="store_true", help="Write the tables into the page.")
    arguments = parser.parse_args(words)
    console = Console(stderr=True)
    try:
        steps, stages = read_measured(arguments.csv), read_stages()
    except (OSError, ValueError) as error:
        parser.error(f"--csv: {error}")
    with Progress(console=console) as progress:
        task = progress.add_task("published steps", total=len(steps) + OTHER_PARTS)
        made = evaluate_all(steps, stages, lambda: progress.advance(task))
    text = text_of(made.lines, measured_errors(made.steps, made.sizes))
    print(text)
    if arguments.write:
        write(text)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_data(made), indent=1) + "\n")
    broken = [f"{bar.text}: {why}" for bar in BARS if (why := bar.broken_by(made.lines))]
    for line in broken:
        console.print(f"below its bar: {line}", markup=False)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
