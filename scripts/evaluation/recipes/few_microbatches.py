"""Fine-tuning recipes with few microbatches: the step of their own command, Megatron's best, and
ours.

All steps fit into the memory of the recipe's own command; the numbers are those of
docs/recipe-gains.csv. Full fine-tuning is counted apart from low-rank adapters, whose passes have
next to no weight gradients for a schedule to move.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scripts.evaluation.recipes.recipe import Recipe
from scripts.evaluation.recipes.slice_gains import class_of, microbatches_of, waits_long
from scripts.tables import table

# Least median, over recipes of full fine-tuning, of the step time under Megatron's best schedule as
# a multiple of the step time under ours.
LEAST_MEDIAN = 1.07
_GAINS = ("stock_gain", "our_gain")
FULL, ADAPTERS = "full fine-tuning", "LoRA"


@dataclass(frozen=True)
class FewMicrobatches:
    """Gains of a recipe with few microbatches over its own command.

    A gain is the seconds of a step of that command divided by those of the best step: under
    Megatron's schedules (``stock_gain``), and under any schedule (``our_gain``).
    """

    recipe: str
    kind: str
    ranks: int
    microbatches: int
    baseline: str
    stock: str
    stock_gain: float
    ours: str
    our_gain: float

    @property
    def ratio(self) -> float:
        """The best step under Megatron's schedules, as a multiple of the best of all."""
        return self.our_gain / self.stock_gain


def few_microbatches(recipes: Iterable[Recipe], file: Path) -> list[FewMicrobatches]:
    """Return the gains of those of ``recipes`` that wait long, as ``file`` has them.

    Full fine-tuning comes before adapters, and larger gains of our schedules over Megatron's best
    before smaller ones. A recipe that is not planned is not in the file.
    """
    with file.open(newline="") as lines:
        rows = {
            (row["recipe"], int(row["ranks"]), int(row["microbatches"])): row
            for row in csv.DictReader(lines)
        }
    made = []
    for recipe in filter(waits_long, recipes):
        row = rows.get((recipe.short_name, recipe.ranks, microbatches_of(recipe)))
        if row is None:
            continue
        stock = row["stock's best"] or row["own line"]
        stock_gain = _gain(row["stock's gain"], 1.0)
        made.append(
            FewMicrobatches(
                recipe.short_name,
                ADAPTERS if class_of(recipe) == ADAPTERS else FULL,
                recipe.ranks,
                microbatches_of(recipe),
                row["own line"],
                stock,
                stock_gain,
                row["best of all"] or stock,
                _gain(row["gain of all"], stock_gain),
            )
        )
    return sorted(made, key=lambda one: (one.kind != FULL, -one.ratio, one.recipe))


def _gain(cell: str, otherwise: float) -> float:
    return float(cell.rstrip("*")) if cell else otherwise


def ratio_of(gains: Sequence[FewMicrobatches], kind: str) -> float:
    """Return the median of the step under Megatron's best schedule, as a multiple of ours."""
    return median(one.ratio for one in gains if one.kind == kind)


def few_microbatches_section(gains: Sequence[FewMicrobatches]) -> str:
    """Return the medians, and a row for each recipe."""
    said = []
    for kind in (FULL, ADAPTERS):
        those = [one for one in gains if one.kind == kind]
        stock, ours = (median(getattr(one, name) for one in those) for name in _GAINS)
        said.append(
            f"**{ratio_of(gains, kind):.2f}** for {kind} ({len(those)} recipes, whose own line's "
            f"step is {stock:.2f} times Megatron's best and {ours:.2f} times ours)"
        )
    rows = [
        [
            f"`{one.recipe}`",
            "LoRA" if one.kind == ADAPTERS else "full",
            f"{one.ranks}, {one.microbatches}",
            one.baseline,
            f"{one.stock_gain:.2f}: {one.stock}",
            f"{one.our_gain:.2f}: {one.ours}",
            f"{one.ratio:.2f}",
        ]
        for one in gains
    ]
    headings = ("recipe", "", "p, m", "own line", "Megatron's best", "ours", "ours over it")
    return f"Median of ours over Megatron's best: {'; '.join(said)}.\n\n{table(headings, rows)}"


def fallen_median(gains: Sequence[FewMicrobatches]) -> str | None:
    """Return which median has fallen below its bar, or None."""
    found = ratio_of(gains, FULL)
    if found >= LEAST_MEDIAN:
        return None
    return f"ours over Megatron's best, {FULL}: the median is {found:.3f}, less than {LEAST_MEDIAN}"
