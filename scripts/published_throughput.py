"""Predicted over published throughput of Megatron-Bridge's recipes, as they stand.

The last line adds the trainings of published_steps.py.

    python -m scripts.published_throughput
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.work import evaluate
from scripts.published_steps import TRAININGS, predicted_seconds
from scripts.recipes.accepting import as_on_gpus
from scripts.recipes.configured import configuration_of
from scripts.recipes.gains import work_of
from scripts.recipes.public_form import read_recipes
from scripts.recipes.recipe import RECIPES, Recipe, read_models, resolve
from scripts.recipes.throughput import published


def throughput(recipe: Recipe, *, in_pairs: bool = False) -> float:
    """Return the tokens per second and GPU that are predicted of ``recipe``.

    Args:
        in_pairs: whether passes run in pairs if the recipe has them so. Else none do.
    """
    with as_on_gpus():
        configuration = configuration_of(recipe)
    work = work_of(configuration, configuration.execution)
    if in_pairs and configuration.execution.overlap:
        work = replace(work, pairs=True)
    found = evaluate(work, configuration.schedule, Layout(configuration.layers), search=False)
    tokens = recipe.settings["global_batch_size"] * recipe.settings["seq_length"]
    assert recipe.gpus is not None
    return float(tokens / found.seconds / recipe.gpus)


def main() -> None:
    models = read_models()
    ratios = []
    for name, raw in read_recipes(RECIPES).items():
        recipe = resolve(name, raw, models)
        reached = published(recipe)
        if reached is None:
            continue
        predicted = throughput(recipe)
        ratio = predicted / reached.tokens
        ratios.append(ratio)
        print(f"{ratio:5.2f} {predicted:7.0f} {reached.tokens:7.0f} {recipe.name}")
    print(_summary(ratios))
    steps = [training.seconds / predicted_seconds(training) for training in TRAININGS]
    print(f"with {len(steps)} published trainings: {_summary([*ratios, *steps])}")


def _summary(ratios: Sequence[float]) -> str:
    within = sum(0.75 <= ratio <= 1.33 for ratio in ratios)
    return (
        f"median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}; "
        f"{within} of {len(ratios)} within 0.75 to 1.33"
    )


if __name__ == "__main__":
    main()
