"""Predicted and published order of pairs: one model on the same GPUs with two parallel layouts.

recipes/published_pairs.json has Megatron-Bridge's published tokens per second and GPU
(docs/performance-summary-archive.md), and the settings of each release by which its figure differs
from today's recipe (scripts/performance/configs at tags v0.3.0 to v0.4.2). Releases differ, so a
pair's software differs, too.

    python -m scripts.published_pairs
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.published_throughput import throughput
from scripts.recipes.public_form import read_recipes
from scripts.recipes.recipe import RECIPES, Recipe, read_models, resolve

PAIRS = Path(__file__).parent / "recipes" / "published_pairs.json"
TIE = 0.02  # published figures that differ by no more are equal


@dataclass(frozen=True)
class Side:
    """A recipe as a ``release`` had it, and the tokens per second and GPU that it reached."""

    release: str
    tokens: float
    recipe: Recipe


@dataclass(frozen=True)
class Compared:
    """Figures of the first over the second of a pair."""

    published: float
    predicted: float

    @property
    def is_tie(self) -> bool:
        return max(self.published, 1 / self.published) <= 1 + TIE

    @property
    def is_right(self) -> bool:
        return (self.published > 1) == (self.predicted > 1)


def read_pairs(path: Path = PAIRS) -> dict[str, tuple[Side, Side]]:
    """Return the pairs in ``path`` by their names."""
    models, recipes = read_models(), read_recipes(RECIPES)

    def side(data: Mapping[str, Any]) -> Side:
        changed = {**recipes[data["recipe"]], **data["changed"]}
        settings = {name: value for name, value in changed.items() if value is not None}
        recipe = resolve(data["recipe"], settings, models)
        return Side(data["release"], data["tokens"], recipe)

    pairs = {}
    for pair in json.loads(path.read_text()):
        first, second = map(side, pair["sides"])
        pairs[pair["pair"]] = first, second
    return pairs


def summary(compared: Iterable[Compared]) -> str:
    """Return how many of the pairs that differ are in the right order."""
    different = [pair for pair in compared if not pair.is_tie]
    right = sum(pair.is_right for pair in different)
    return f"differ by more than {TIE:.0%}: {right} of {len(different)} in the right order"


def _sizes(recipe: Recipe) -> str:
    settings = recipe.settings
    names = {
        "TP": "tensor_model_parallel_size",
        "PP": "pipeline_model_parallel_size",
        "CP": "context_parallel_size",
        "EP": "expert_model_parallel_size",
    }
    sizes: Sequence[str] = [
        f"{word} {settings[name]}" for word, name in names.items() if (settings.get(name) or 1) > 1
    ]
    return ", ".join([*sizes, f"vpp {recipe.chunks}", f"mb {settings['micro_batch_size']}"])


def main() -> None:
    warnings.filterwarnings("ignore")
    found = []
    print("| pair | published | predicted | tokens per second and GPU: published, predicted |")
    print("| - | - | - | - |")
    for name, sides in read_pairs().items():
        predicted = [throughput(side.recipe, in_pairs=True) for side in sides]
        first, second = sides
        pair = Compared(first.tokens / second.tokens, predicted[0] / predicted[1])
        found.append(pair)
        words = "tie" if pair.is_tie else "right" if pair.is_right else "wrong"
        figures = "; ".join(
            f"{_sizes(side.recipe)} ({side.release}): {side.tokens:.0f}, {tokens:.0f}"
            for side, tokens in zip(sides, predicted, strict=True)
        )
        ratios = f"{pair.published:.2f} | {pair.predicted:.2f}, {words}"
        print(f"| {name} | {ratios} | {figures} |", flush=True)
    print(summary(found))


if __name__ == "__main__":
    main()
