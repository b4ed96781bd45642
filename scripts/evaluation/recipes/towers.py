"""Gains of layouts for public models with a vision tower.

One recipe of each model, with the tower and the language model trained, and with nothing but the
projector trained. The tower sees as many patches as the language model sees tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context

from megatron_ext.cost_model.tower import TowerTraining
from megatron_ext.planner.planning_time import planning, start_planning_time
from scripts.evaluation.recipes.accepting import as_on_gpus, others
from scripts.evaluation.recipes.configured import configuration_of
from scripts.evaluation.recipes.gains import PROCESSES, Configuration, Gains, gains_of
from scripts.evaluation.recipes.public_form import read_recipes
from scripts.evaluation.recipes.recipe import RECIPES, read_models, resolve

_SECONDS = 120.0  # limit in CPU seconds for each case
_COLUMNS = (
    *("model", "recipe", "trained", "own line"),
    *("stock's best", "stock's gain", "best of all", "gain of all"),
)


@dataclass(frozen=True)
class Case:
    """A recipe whose tower is trained in one way: wholly, or only its projector."""

    model: str
    recipe: str
    trained: str
    configuration: Configuration


def cases() -> Iterator[Case]:
    """Yield two cases for each public model with a tower that a recipe trains in a pipeline."""
    models, done = read_models(), set()
    with as_on_gpus():
        defaults = others()
        for name, raw in read_recipes(RECIPES).items():
            try:
                recipe = resolve(name, raw, models, defaults)
                if recipe.model in done or not isinstance(recipe.dimensions.get("vision"), dict):
                    continue
                configuration = configuration_of(recipe)
            except ValueError:  # the next recipe of the same model may have a configuration
                continue
            tower = configuration.model.tower
            if tower is None or configuration.ranks == 1 or recipe.model is None:
                continue
            done.add(recipe.model)
            for trained, is_frozen in (("all", False), ("the projector", True)):
                part = TowerTraining.PROJECTOR if is_frozen else TowerTraining.ALL
                model = replace(configuration.model, tower=replace(tower, trained=part))
                changed = replace(configuration, model=model, is_frozen=is_frozen, recompute=())
                yield Case(recipe.model, recipe.short_name, trained, changed)


def _row(case: Case) -> list[str]:
    with planning(_SECONDS):
        start_planning_time()
        try:
            gains: Gains | str = gains_of(case.configuration)
        except ValueError as error:
            gains = str(error)
    start = [case.model.rpartition("/")[2], case.recipe, case.trained]
    if isinstance(gains, str):
        return [*start, gains, "", "", "", ""]
    row = [*start, gains.baseline.schedule]
    for option in (gains.stock, gains.ours):
        layers = " ".join(map(str, option.layers))
        row += [f"{option.schedule}: {layers}", f"{option.gain:.3f}"]
    return row


def tower_rows() -> Iterator[list[str]]:
    """Yield the rows of docs/tower-gains.csv, after one with the names of its columns."""
    yield list(_COLUMNS)
    with get_context("spawn").Pool(PROCESSES) as pool:
        yield from pool.imap(_row, list(cases()))
