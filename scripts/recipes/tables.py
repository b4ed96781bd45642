"""Tables of docs/recipes.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["-"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def name_of(recipe: str) -> str:
    """Return the name of the function that makes the recipe."""
    return recipe.partition(":")[2].removesuffix("_config") or recipe
