"""Compare public recipes with experts under Megatron's schedule and ours, with pairs of passes.

    python scripts/recipe_pairs.py [FILE.json] [--json ROWS.json] [--only WORD]

FILE has recipes by name, as scripts/recipes/recipes.json, which is taken without one. The
script compares those that overlap experts' messages with other microbatches, and capture no graph
of a whole iteration. It takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

from scripts.recipes.accepting import as_on_gpus  # noqa: E402
from scripts.recipes.pairs.page import page  # noqa: E402
from scripts.recipes.pairs.recipes import candidates_of, compare_all  # noqa: E402
from scripts.recipes.public_form import read_recipes  # noqa: E402
from scripts.recipes.recipe import RECIPES, read_models, resolve  # noqa: E402


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=RECIPES)
    parser.add_argument("--json", type=Path, help="write all figures, and the layouts")
    parser.add_argument("--only", default="", help="of recipes with this in their name")
    arguments = parser.parse_args(words)
    console = Console(stderr=True)
    models = read_models()
    try:
        recipes = [resolve(name, raw, models) for name, raw in read_recipes(arguments.file).items()]
    except ValueError as error:
        console.print(f"error: {error}", markup=False)
        return 1
    with as_on_gpus():
        candidates, left = candidates_of(r for r in recipes if arguments.only in r.name)
    for line in left:
        console.print(f"not compared: {line}", markup=False)
    with Progress(console=console) as progress:
        steps = progress.add_task("recipes", total=len(candidates))
        results = compare_all(candidates, lambda: progress.advance(steps))
    print(page(results))
    if arguments.json is not None:
        data = [result.as_data() for result in results]
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
