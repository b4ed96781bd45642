"""How many recipes are accepted under our schedules, shown by tests, and what a plan would gain
them: docs/recipes.md.

    python scripts/recipe_coverage.py [FILE.json] [--output PAGE.md] [--json ROWS.json]

FILE has recipes by name, each with its settings by name, as scripts/recipes/recipes.json, which is
taken without one. A recipe with a key, a value or a model that nobody knows is listed as such, does
not count as accepted, and the exit status is 1. Plans take half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.progress import Progress, TaskID  # noqa: E402

from scripts.recipes.accepting import as_on_gpus, judge, judge_on_v  # noqa: E402
from scripts.recipes.configured import configuration_of  # noqa: E402
from scripts.recipes.counting import as_json, count, rows  # noqa: E402
from scripts.recipes.gains import Configuration, Found, all_gains  # noqa: E402
from scripts.recipes.markers import collect  # noqa: E402
from scripts.recipes.page import own, page  # noqa: E402
from scripts.recipes.prospects import prospects_of  # noqa: E402
from scripts.recipes.recipe import RECIPES, read_recipes  # noqa: E402
from scripts.recipes.tested import Evidence  # noqa: E402


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, default=RECIPES)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "recipes.md")
    parser.add_argument("--json", type=Path, help="write all that is known of each recipe")
    arguments = parser.parse_args(words)
    console = Console(stderr=True)
    try:
        recipes = read_recipes(arguments.file)
        with console.status("collecting what tests show"):
            evidence = Evidence(collect())
    except (ValueError, RuntimeError) as error:
        console.print(f"error: {error}", markup=False)
        return 1
    with Progress(console=console) as progress, as_on_gpus():
        task = progress.add_task("recipes", total=len(recipes))
        made = rows(recipes, evidence, judge, judge_on_v, lambda name: progress.advance(task))
        planned = progress.add_task("plans", total=None)
        understood = [row.recipe for row in made if row.recipe]
        prospects = prospects_of(understood, configuration_of, partial(_plans, progress, planned))
    arguments.output.write_text(page(made, evidence, prospects))
    if arguments.json is not None:
        of_recipes = {prospect.recipe.name: prospect.as_data() for prospect in prospects}
        data = [{**as_json(row), "plan": of_recipes.get(row.name)} for row in made]
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")
    total = count(made, own)
    print(
        f"{total.recipes} recipes: {total.accepted} accepted, {sum(total.tested.values())} shown, "
        f"{sum(total.covered.values())} covered; {total.stock_cannot} stock cannot run"
    )
    for row in made:
        if row.unknown:
            print(f"not understood: {row.name}: {row.unknown}", file=sys.stderr)
    return int(total.unknown > 0)


def _plans(
    progress: Progress, task: TaskID, configurations: Sequence[Configuration]
) -> dict[Configuration, Found]:
    progress.update(task, total=len(set(configurations)))
    return all_gains(configurations, lambda: progress.advance(task))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
