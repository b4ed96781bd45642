"""Predictions for each recipe: its own launch command, its possible gains, and the published
figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.recipes.gains import Configuration, Found, Gains
from scripts.recipes.recipe import Recipe
from scripts.recipes.throughput import Published, published


@dataclass(frozen=True)
class Prospect:
    """Prediction for a recipe.

    Attributes:
        gains: gains, or why there are none.
        published: published figure; None if there is none.
    """

    recipe: Recipe
    configuration: Configuration | None
    gains: Found
    published: Published | None = None

    @property
    def tokens(self) -> float | None:
        """Tokens per second and GPU, as predicted for its own launch command."""
        if not isinstance(self.gains, Gains) or self.recipe.gpus is None:
            return None
        tokens = self.recipe.settings["global_batch_size"] * self.recipe.settings["seq_length"]
        return float(tokens / self.gains.own.seconds / self.recipe.gpus)

    @property
    def ratio(self) -> float | None:
        """Predicted over published throughput."""
        if self.tokens is None or self.published is None:
            return None
        return self.tokens / self.published.tokens

    def as_data(self) -> dict[str, Any]:
        """Return the prediction as data for other programs."""
        gains = asdict(self.gains) if isinstance(self.gains, Gains) else {"why_none": self.gains}
        reached = self.published and asdict(self.published)
        return {**gains, "tokens_per_second_and_gpu": self.tokens, "published": reached}


def prospects_of(
    recipes: Iterable[Recipe],
    configuration_of: Callable[[Recipe], Configuration],
    all_gains: Callable[[Sequence[Configuration]], Mapping[Configuration, Found]],
) -> list[Prospect]:
    """Return the prediction for each of ``recipes``.

    Args:
        configuration_of: raises ValueError if a recipe's configuration is not known.
        all_gains: returns the gains of configurations, each once.
    """
    resolved: list[tuple[Recipe, Configuration | str]] = []
    for recipe in recipes:
        try:
            resolved.append((recipe, configuration_of(recipe)))
        except Exception as error:  # of this recipe, as in `counting.rows`
            resolved.append((recipe, " ".join(str(error).split()) or type(error).__name__))
    found = all_gains([known for _, known in resolved if isinstance(known, Configuration)])
    return [
        Prospect(recipe, known, found[known], published(recipe))
        if isinstance(known, Configuration)
        else Prospect(recipe, None, known)
        for recipe, known in resolved
    ]
