"""Tables of docs/recipes.md."""

from __future__ import annotations


def name_of(recipe: str) -> str:
    """Return the name of the function that makes the recipe."""
    return recipe.partition(":")[2].removesuffix("_config") or recipe
