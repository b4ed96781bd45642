"""Verdicts and tests of every recipe of a file, and counts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.recipes.recipe import Recipe, Settings, read_models, resolve
from scripts.recipes.tested import Evidence, Tested, text_of
from scripts.recipes.verdict import Verdict

V = "v"
LARGE_BUBBLE = 0.05  # of a step


@dataclass(frozen=True)
class Under:
    """A recipe under a schedule."""

    verdict: Verdict
    tested: Tested

    @property
    def is_covered(self) -> bool:
        """Accepted with all its settings, and all of them are shown."""
        return self.verdict.is_accepted and self.tested.grade is not None


@dataclass(frozen=True)
class Row:
    """A recipe. ``unknown`` says why it is not understood; the other fields are empty then."""

    name: str
    recipe: Recipe | None = None
    own: Under | None = None
    v: Under | None = None
    unknown: str | None = None

    @property
    def has_large_bubble(self) -> bool:
        bubble = self.recipe.bubble if self.recipe else None
        return bubble is not None and bubble > LARGE_BUBBLE


Judge = Callable[[Recipe], Verdict]


def rows(
    recipes: Mapping[str, Any],
    evidence: Evidence,
    judge: Judge,
    judge_on_v: Judge,
    report: Callable[[str], None] = lambda name: None,
    others: Settings | None = None,
    models: Mapping[str, Settings] | None = None,
) -> list[Row]:
    """Return a row for each of ``recipes``, in any public form; ``report`` is called with its name
    first.

    Any error while a recipe is read or judged becomes the reason why it is not understood, so that
    the other recipes are still counted.

    Args:
        others: the settings that Megatron has in addition to the vocabulary's, with their defaults.
        models: models by name; None takes those of models.json.
    """
    models = read_models() if models is None else models
    made = []
    for name, raw in recipes.items():
        report(name)
        try:
            recipe = resolve(name, raw, models, others)
            own = Under(judge(recipe), evidence.of(recipe.kind, recipe.features))
            on_v = Under(judge_on_v(recipe), evidence.of(V, recipe.features))
        except ValueError as error:
            made.append(Row(name, unknown=" ".join(str(error).split())))
        except Exception as error:
            made.append(Row(name, unknown=f"{type(error).__name__}: {error}"))
        else:
            made.append(Row(name, recipe, own, on_v))
    return made


@dataclass
class Count:
    """Counts of some recipes, each under one schedule."""

    recipes: int = 0
    unknown: int = 0
    stock_cannot: int = 0
    accepted: int = 0
    after_dropping: int = 0
    tested: dict[str, int] = field(default_factory=lambda: dict.fromkeys("ABC", 0))
    covered: dict[str, int] = field(default_factory=lambda: dict.fromkeys("ABC", 0))


def count(made: Iterable[Row], under: Callable[[Row], Under | None]) -> Count:
    """Return the counts of the rows ``made``, each under the schedule that ``under`` gives."""
    total = Count()
    for row in made:
        total.recipes += 1
        what = under(row)
        if what is None:
            total.unknown += 1
            continue
        verdict, grade = what.verdict, what.tested.grade
        total.stock_cannot += verdict.why_stock is not None
        total.accepted += verdict.is_accepted
        total.after_dropping += bool(verdict.without)
        if grade is not None:
            total.tested[grade] += 1
            total.covered[grade] += what.is_covered
    return total


def as_json(row: Row) -> dict[str, Any]:
    """Return ``row`` as data for other programs."""
    if row.recipe is None or row.own is None or row.v is None:
        return {"recipe": row.name, "unknown": row.unknown}
    return {
        "recipe": row.name,
        "model": row.recipe.model,
        "bubble": row.recipe.bubble,
        "features": sorted(map(str, row.recipe.features)),
        **{key: _under_as_json(under) for key, under in (("own", row.own), ("v", row.v))},
    }


def _under_as_json(under: Under) -> dict[str, Any]:
    verdict = under.verdict
    return {
        "schedule": verdict.schedule,
        "accepted": verdict.is_accepted,
        "refused": verdict.why,
        "stock_cannot": verdict.why_stock,
        "accepted_without": verdict.without,
        "microbatches": verdict.microbatches,
        "grade": under.tested.grade,
        "missing": [text_of(wanted) for wanted in under.tested.missing],
        "covered": under.is_covered,
    }
