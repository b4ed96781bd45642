"""Verdicts on every recipe of a file, and counts of them.

The share of public recipes that we accept is only worth something if every recipe is counted, those
too that are not understood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from scripts.evaluation.recipes.public_form import Settings
from scripts.evaluation.recipes.recipe import Recipe, read_models, resolve
from scripts.evaluation.recipes.verdict import Verdict

LARGE_BUBBLE = 0.05  # share of a step from which a bubble counts as large


@dataclass(frozen=True)
class Row:
    """A recipe with the verdicts on it.

    Attributes:
        on_stages: verdict under a schedule that keeps the recipe's stages.
        v: verdict under a schedule whose stages lie on a V.
        unknown: why the recipe is not understood; the other fields are then None.
    """

    name: str
    recipe: Recipe | None = None
    on_stages: Verdict | None = None
    v: Verdict | None = None
    unknown: str | None = None

    @property
    def has_large_bubble(self) -> bool:
        bubble = self.recipe.bubble if self.recipe else None
        return bubble is not None and bubble > LARGE_BUBBLE


Judge = Callable[[Recipe], Verdict]


def rows(
    recipes: Mapping[str, Any],
    judge: Judge,
    judge_on_v: Judge,
    report: Callable[[], None] = lambda: None,
    others: Settings | None = None,
    models: Mapping[str, Settings] | None = None,
) -> list[Row]:
    """Return a row for each recipe of ``recipes``; ``report`` is called after each recipe.

    The settings of a recipe may be a nested config, dotted names or names of flags. Any error while
    a recipe is read or judged becomes the reason why it is not understood, so that the other
    recipes are still counted.

    Args:
        others: the settings that Megatron has in addition to `NAMES`, with their defaults.
        models: models by name; None takes those of recipes.json.
    """
    models = read_models() if models is None else models
    made = []
    for name, raw in recipes.items():
        try:
            recipe = resolve(name, raw, models, others)
            made.append(Row(name, recipe, judge(recipe), judge_on_v(recipe)))
        except ValueError as error:
            made.append(Row(name, unknown=" ".join(str(error).split())))
        except Exception as error:
            made.append(Row(name, unknown=f"{type(error).__name__}: {error}"))
        report()
    return made


@dataclass
class Count:
    """Counts of some recipes, each under one schedule.

    Attributes:
        unknown: recipes that are not understood.
        stock_cannot: recipes that Megatron itself cannot run.
        accepted: recipes that we accept.
        after_dropping: recipes that we would accept without some of their settings.
    """

    recipes: int = 0
    unknown: int = 0
    stock_cannot: int = 0
    accepted: int = 0
    after_dropping: int = 0


def count(made: Iterable[Row], under: Callable[[Row], Verdict | None]) -> Count:
    """Return the counts of the rows ``made``. ``under`` returns the one of a row's verdicts that is
    counted."""
    total = Count()
    for row in made:
        total.recipes += 1
        verdict = under(row)
        if verdict is None:
            total.unknown += 1
            continue
        total.stock_cannot += verdict.why_stock is not None
        total.accepted += verdict.is_accepted
        total.after_dropping += bool(verdict.without)
    return total


def as_json(row: Row) -> dict[str, Any]:
    """Return ``row`` as data for other programs."""
    if row.recipe is None or row.on_stages is None or row.v is None:
        return {"recipe": row.name, "unknown": row.unknown}
    return {
        "recipe": row.name,
        "model": row.recipe.model,
        "bubble": row.recipe.bubble,
        # plain words: a key of the JSON that --json prints
        **{key: asdict(verdict) for key, verdict in (("own", row.on_stages), ("v", row.v))},
    }
