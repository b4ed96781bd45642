"""Public recipes: which are accepted, what a plan would gain, and the pages that say so.

It runs the parts in their order: every recipe is judged, distinct configurations are planned, and
the pages, their CSV files and README are written from both.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from scripts.evaluation.recipes.accepting import (
    as_on_gpus,
    judge,
    judge_on_v,
    others,
    why_no_slices,
)
from scripts.evaluation.recipes.configured import configuration_of
from scripts.evaluation.recipes.counting import Row, as_json, count, rows
from scripts.evaluation.recipes.few_microbatches import (
    fallen_median,
    few_microbatches,
    few_microbatches_section,
)
from scripts.evaluation.recipes.gains import Configuration, Found, all_gains
from scripts.evaluation.recipes.gains_page import gains_section, gains_table
from scripts.evaluation.recipes.page import on_recipe_stages, refusals, summary, totals
from scripts.evaluation.recipes.prospects import Prospect, prospects_of
from scripts.evaluation.recipes.public_form import read_recipes
from scripts.evaluation.recipes.readme import RECIPES_PAGE, write_headline
from scripts.evaluation.recipes.recipe import RECIPES, Recipe, read_models, resolve
from scripts.evaluation.recipes.slice_gains import (
    broken_bar,
    read_whole_gains,
    slice_gains,
    slices_section,
    slices_table,
    waits_long,
)
from scripts.evaluation.recipes.towers import tower_rows
from scripts.tables import with_part

GAINS, TOWERS, SLICES = (
    RECIPES_PAGE.with_name(f"{what}-gains.csv") for what in ("recipe", "tower", "slice")
)


def evaluate_recipes(
    file: Path | None, console: Console, *, plans: bool
) -> tuple[list[str], list[dict[str, Any]], int]:
    """Return the counts in lines, the data of each recipe, and an exit status.

    Args:
        file: recipes of others; None takes those of the repository, and writes the pages about
            them.
        plans: whether the recipes of the repository are planned anew.
    Raises:
        ValueError: the file is not understood.
    """
    recipes = read_recipes(file or RECIPES)
    models = {**read_models(), **(read_models(file) if file else {})}
    prospects: list[Prospect] = []
    with Progress(console=console) as progress, as_on_gpus():
        task = progress.add_task("recipes", total=len(recipes))
        report = partial(progress.advance, task)
        made = rows(recipes, judge, judge_on_v, report, others=others(), models=models)
        understood = [row.recipe for row in made if row.recipe]
        if file is None and plans:
            planned = partial(_plans, progress, progress.add_task("plans", total=None))
            prospects = prospects_of(understood, configuration_of, planned)
    fallen = None
    if file is None:
        _write(made, prospects, console)
        few = few_microbatches(understood, GAINS)
        _write_part("few microbatches", few_microbatches_section(few))
        fallen = fallen_median(few)
    of_recipes = {prospect.recipe.name: prospect.as_data() for prospect in prospects}
    data = [{**as_json(row), "plan": of_recipes.get(row.name)} for row in made]
    lines = [*summary(made), *([] if fallen is None else [f"below its bar: {fallen}"])]
    unknown = count(made, on_recipe_stages).unknown
    return lines, data, int(unknown > 0 or fallen is not None)


def evaluate_slices(console: Console) -> tuple[list[str], list[dict[str, Any]], int]:
    """Plan the recipes whose ranks wait long in slices of sequences, and write the results.

    They are written into a part of docs/recipes.md and its CSV file. Return the lines, the data of
    each recipe, and an exit status.
    """
    recipes: list[Recipe] = []
    configurations: dict[str, Configuration | str] = {}
    why_not: dict[str, str] = {}
    with console.status("planning recipes in slices"), as_on_gpus():
        models, defaults = read_models(), others()
        for name, raw in read_recipes(RECIPES).items():
            try:
                recipe = resolve(name, raw, models, defaults)
            except ValueError:  # the error is reported later, by `evaluate_recipes`
                continue
            if not waits_long(recipe):
                continue
            recipes.append(recipe)
            try:
                configurations[name] = configuration_of(recipe)
            except ValueError as error:
                configurations[name] = " ".join(str(error).split())
            if (why := why_no_slices(recipe)) is not None:
                why_not[name] = why
        gains = slice_gains(recipes, configurations, why_not, read_whole_gains(GAINS))
    section = slices_section(gains)
    SLICES.write_text(slices_table(gains))
    _write_part("slices", section)
    broken = broken_bar(gains)
    lines = [section, *([] if broken is None else [f"below its bar: {broken}"])]
    return lines, [asdict(gain) for gain in gains], int(broken is not None)


def _write(made: Sequence[Row], prospects: Sequence[Prospect], console: Console) -> None:
    """Write the parts of docs/recipes.md, its CSV files, and the headline of README.md."""
    parts = {"accepted": totals(made), "refused": refusals(made)}
    if prospects:
        parts["gains"] = gains_section(prospects)
        GAINS.write_text(gains_table(prospects, made))
        with console.status("planning models with a vision tower"):
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(tower_rows())
            TOWERS.write_text(text.getvalue())
    for name, part in parts.items():
        _write_part(name, part)
    write_headline()


def _write_part(name: str, text: str) -> None:
    """Write the part of docs/recipes.md between the marks of ``name``."""
    RECIPES_PAGE.write_text(with_part(RECIPES_PAGE.read_text(), name, text))


def _plans(
    progress: Progress, task: TaskID, configurations: Sequence[Configuration]
) -> dict[Configuration, Found]:
    progress.update(task, total=len(set(configurations)))
    return all_gains(configurations, lambda: progress.advance(task))
