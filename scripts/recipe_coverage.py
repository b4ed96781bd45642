"""How many public recipes are accepted under our schedules, shown by tests, and gain by a plan.

    python scripts/recipe_coverage.py                                       writes docs/recipes.md,
    scripts/recipes/coverage.md behind it, and the headline of README.md
    python scripts/recipe_coverage.py --recipes FILE.json [--models FILE.json] [--output PAGE.md]

FILE has recipes as they are public: by name, each with its settings by dotted names or nested, with
values of JSON or as text, layouts as text or nested lists. A recipe with a key, a value or a model
that is not understood is named as such, counts as not accepted, and makes the exit status 1. Plans
take half an hour on two cores; without a page there are none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "recipes.md"
DETAILS = ROOT / "scripts" / "recipes" / "coverage.md"
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.progress import Progress, TaskID  # noqa: E402

from scripts.recipes.accepting import as_on_gpus, judge, judge_on_v, others  # noqa: E402
from scripts.recipes.configured import configuration_of  # noqa: E402
from scripts.recipes.counting import Row, as_json, count, rows  # noqa: E402
from scripts.recipes.gains import Configuration, Found, all_gains  # noqa: E402
from scripts.recipes.gains_page import TABLE, gains_table  # noqa: E402
from scripts.recipes.markers import collect  # noqa: E402
from scripts.recipes.page import details, own, page, plans_of, summary  # noqa: E402
from scripts.recipes.prospects import Prospect, prospects_of  # noqa: E402
from scripts.recipes.public_form import read_recipes  # noqa: E402
from scripts.recipes.readme import write_headline  # noqa: E402
from scripts.recipes.recipe import RECIPES, read_models  # noqa: E402
from scripts.recipes.tested import Evidence  # noqa: E402


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--recipes", type=Path, help="recipes; without it those of the repository")
    parser.add_argument(
        "--models", type=Path, help="more models by name, as scripts/recipes/models.json has them"
    )
    parser.add_argument("--output", type=Path, help="write a page such as docs/recipes.md")
    parser.add_argument(
        "--keep-plans", action="store_true", help="leave the plans of the page as they stand there"
    )
    parser.add_argument("--json", type=Path, help="write all that is known of each recipe")
    arguments = parser.parse_args(words)
    output = arguments.output or (PAGE if arguments.recipes is None else None)
    console = Console(stderr=True)
    try:
        recipes = read_recipes(arguments.recipes or RECIPES)
        models = {**read_models(), **(read_models(arguments.models) if arguments.models else {})}
        with console.status("collecting what tests show"):
            evidence = Evidence(collect())
    except (OSError, ValueError, RuntimeError) as error:
        console.print(f"error: {error}", markup=False)
        return 1
    prospects: list[Prospect] = []
    with Progress(console=console) as progress, as_on_gpus():
        task = progress.add_task("recipes", total=len(recipes))
        made = rows(
            *(recipes, evidence, judge, judge_on_v, lambda name: progress.advance(task)),
            others=others(),
            models=models,
        )
        if output is not None and not arguments.keep_plans:
            planned = progress.add_task("plans", total=None)
            understood = [row.recipe for row in made if row.recipe]
            plans = partial(_plans, progress, planned)
            prospects = prospects_of(understood, configuration_of, plans)
    if output is not None:
        _write(output, made, prospects, evidence, keep_plans=arguments.keep_plans)
    if arguments.json is not None:
        of_recipes = {prospect.recipe.name: prospect.as_data() for prospect in prospects}
        data = [{**as_json(row), "plan": of_recipes.get(row.name)} for row in made]
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")
    print("\n".join(summary(made)))
    return int(count(made, own).unknown > 0)


def _write(
    output: Path,
    made: Sequence[Row],
    prospects: Sequence[Prospect],
    evidence: Evidence,
    *,
    keep_plans: bool,
) -> None:
    """Write the page ``output``, and what belongs to it: tables, and the headline of README.md."""
    text = page(made, prospects, plans_of(output.read_text()) if keep_plans else None)
    if output == PAGE:
        DETAILS.write_text(details(made, evidence))
    else:
        text += details(made, evidence)
    output.write_text(text)
    if prospects:
        output.with_name(TABLE).write_text(gains_table(prospects, made))
    if output == PAGE:
        write_headline()


def _plans(
    progress: Progress, task: TaskID, configurations: Sequence[Configuration]
) -> dict[Configuration, Found]:
    progress.update(task, total=len(set(configurations)))
    return all_gains(configurations, lambda: progress.advance(task))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
