"""Throughput of recipes as their authors have published it: tokens per second and GPU.

published.csv has Megatron-Bridge's own tables, docs/performance-summary.md and its archive, at
commit 067f987d: the newest figure of each configuration with a pipeline.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scripts.recipes.recipe import Recipe

PUBLISHED = Path(__file__).parent / "published.csv"
_TASKS = ("pretrain", "sft", "peft")
_OF_SETTINGS = (
    *("precision", "global_batch_size", "micro_batch_size", "seq_length"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
)
_COLUMNS = ("task", "model", "gpu", "gpus", *_OF_SETTINGS, "chunks", "expert_model_parallel_size")

Key = tuple[str, ...]  # of `_COLUMNS`


@dataclass(frozen=True)
class Published:
    """A figure of a ``release`` of Megatron-Bridge's container."""

    release: str
    tokens: float


def published(recipe: Recipe) -> Published | None:
    """Return the published figure of ``recipe``; None if there is none."""
    return _table().get(_key(recipe))


@cache
def _table() -> dict[Key, Published]:
    with PUBLISHED.open() as file:
        return {
            tuple(row[column] for column in _COLUMNS): Published(
                row["release"], float(row["tokens_per_second_and_gpu"])
            )
            for row in csv.DictReader(file)
        }


def _key(recipe: Recipe) -> Key:
    task = next((task for task in _TASKS if f"_{task}_" in recipe.name), None)
    settings = {name: recipe.settings.get(name) or 1 for name in _OF_SETTINGS}
    experts = recipe.settings.get("expert_model_parallel_size") or 1
    figures = (*settings.values(), recipe.chunks, experts)
    return (str(task), recipe.model, str(recipe.gpu), str(recipe.gpus), *map(str, figures))
