"""Predictions for each recipe: its own launch command and its possible gains. Recipes with the same
configuration are planned once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.evaluation.recipes.gains import Configuration, Found, Gains
from scripts.evaluation.recipes.recipe import Recipe


@dataclass(frozen=True)
class Prospect:
    """Prediction for a recipe.

    Attributes:
        configuration: its training job; None if it is not known.
        gains: what it could gain, or the reason why this is not known.
    """

    recipe: Recipe
    configuration: Configuration | None
    gains: Found

    def as_data(self) -> dict[str, Any]:
        """Return the gains as data for other programs."""
        return asdict(self.gains) if isinstance(self.gains, Gains) else {"why_none": self.gains}


def prospects_of(
    recipes: Iterable[Recipe],
    configuration_of: Callable[[Recipe], Configuration],
    all_gains: Callable[[Sequence[Configuration]], Mapping[Configuration, Found]],
) -> list[Prospect]:
    """Return the prediction for each of ``recipes``.

    Args:
        configuration_of: returns a recipe's configuration; raises ValueError if it is not known.
        all_gains: returns the gains of configurations, each of which is planned once.
    """
    resolved: list[tuple[Recipe, Configuration | str]] = []
    for recipe in recipes:
        try:
            resolved.append((recipe, configuration_of(recipe)))
        except Exception as error:  # any error is reported for the recipe, as in `counting.rows`
            resolved.append((recipe, " ".join(str(error).split()) or type(error).__name__))
    found = all_gains([known for _, known in resolved if isinstance(known, Configuration)])
    return [
        Prospect(recipe, known, found[known])
        if isinstance(known, Configuration)
        else Prospect(recipe, None, known)
        for recipe, known in resolved
    ]
