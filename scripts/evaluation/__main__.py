"""Comparison of predictions with what was measured, and of public recipes with what we accept.

    python -m scripts.evaluation            prints how far predicted steps are from measured.csv's,
                                            and whether they have the measured order; two minutes
    python -m scripts.evaluation --write    writes that into docs/estimated-costs.md
    python -m scripts.evaluation recipes    counts which of recipes.json are accepted, plans them,
                                            and writes the tables of docs/recipes.md and the
                                            headline of README.md; forty minutes on two cores
    python -m scripts.evaluation recipes --keep-plans       counts alone; minutes
    python -m scripts.evaluation slices     plans fine-tuning recipes with long bubbles in slices,
                                            and writes the table of docs/recipes.md; minutes
    python -m scripts.evaluation recipes --file FILE.json   counts another file's, writes nothing

FILE is JSON: recipes by name, in any public form (`recipes.public_form`), or an object with such
recipes as "recipes" and their models as "models". A recipe that is not understood counts as not
accepted, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from scripts.evaluation.bars import violations
from scripts.evaluation.measured import MEASURED, read_measured
from scripts.evaluation.page import text_of, write
from scripts.evaluation.spreads import measured_errors
from scripts.evaluation.stage_times import read_stages
from scripts.evaluation.tables import OTHER_PARTS, as_data, evaluate_all


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("steps", "recipes", "slices"), default="steps")
    parser.add_argument("--file", type=Path, help="file of measured steps, or of recipes")
    parser.add_argument("--json", type=Path, help="JSON file to write all results to, row by row")
    parser.add_argument(
        "--write", action="store_true", help="write the tables of predicted steps into their pages"
    )
    parser.add_argument(
        "--keep-plans",
        action="store_true",
        help="with recipes: only count the accepted ones, and leave the computed plans as they are",
    )
    given = parser.parse_args(words)
    if given.write and (given.what != "steps" or given.file):
        parser.error("--write goes with the steps of measured.csv: recipes write without it")
    if given.file and given.what == "slices":
        parser.error("--file goes with steps and recipes")
    if given.keep_plans and given.what != "recipes":
        parser.error("--keep-plans goes with recipes")
    console = Console(stderr=True)
    data: object
    try:
        if given.what == "recipes":
            # The module is imported only if it is needed, since it imports Megatron.
            from scripts.evaluation.recipes.evaluated import evaluate_recipes

            lines, data, status = evaluate_recipes(given.file, console, plans=not given.keep_plans)
            print("\n".join(lines))
        elif given.what == "slices":
            # The module is imported only if it is needed, since it imports Megatron.
            from scripts.evaluation.recipes.evaluated import evaluate_slices

            lines, data, status = evaluate_slices(console)
            print("\n".join(lines))
        else:
            data, status = _evaluate_steps(given.file or MEASURED, console, writes=given.write)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if given.json is not None:
        given.json.write_text(json.dumps(data, indent=1) + "\n")
    return status


def _evaluate_steps(file: Path, console: Console, *, writes: bool) -> tuple[object, int]:
    """Print the tables on steps, and return their data and an exit status."""
    steps, stages = read_measured(file), read_stages(file)
    with Progress(console=console) as progress:
        task = progress.add_task("published steps", total=len(steps) + OTHER_PARTS)
        made = evaluate_all(steps, stages, lambda: progress.advance(task))
    text = text_of(made.lines, measured_errors(made.steps, made.sizes))
    print(text)
    if writes:
        write(text)
    unexpected = violations(made.lines)
    for line in unexpected:
        console.print(line, markup=False)
    return as_data(made), int(bool(unexpected))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
