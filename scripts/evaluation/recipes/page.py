"""Tables of docs/recipes.md on what is accepted, and on what is refused. Reasons that differ only
in names or numbers are counted together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from scripts.evaluation.recipes.counting import LARGE_BUBBLE, Row, count
from scripts.evaluation.recipes.verdict import Verdict
from scripts.tables import table


def on_recipe_stages(row: Row) -> Verdict | None:
    return row.on_stages


def on_v(row: Row) -> Verdict | None:
    return row.v


def totals(made: Sequence[Row]) -> str:
    """Return the table that counts the accepted recipes."""
    large = f"those with more than {LARGE_BUBBLE:.0%} of bubble"
    lines = []
    for name, of in (("all", made), (large, [row for row in made if row.has_large_bubble])):
        for schedule, under in (("own stages", on_recipe_stages), ("v-auto", on_v)):
            total = count(of, under)
            share = _share(total.accepted, total.recipes)
            lines.append([f"{name}, {schedule}", total.recipes, share, total.after_dropping])
    return table(["", "recipes", "accepted", "after dropping"], lines)


def _share(part: int, total: int) -> str:
    return f"{part} ({part / total:.0%})" if total else "0"


def refusals(made: Sequence[Row]) -> str:
    """Return the table of refused settings, with the number of recipes that have each."""
    counts: dict[str, Counter[str]] = {}
    for row in made:
        for column, verdict in (("stages", row.on_stages), ("v", row.v)):
            if verdict and verdict.why and not verdict.why_stock:
                of_reason = counts.setdefault(_short(verdict.why), Counter())
                of_reason[column] += 1
                of_reason[f"{column} without"] += bool(verdict.without)
    lines = [
        [why, *(counts[why][key] for key in ("stages", "stages without", "v", "v without"))]
        for why in sorted(counts, key=lambda why: (-counts[why]["stages"], why))
    ]
    headings = ["refused setting", "own stages", "after dropping", "v-auto", "after dropping"]
    return table(headings, lines)


def _short(why: str) -> str:
    """Return the reason ``why`` without the parts that differ from recipe to recipe."""
    found = re.search(r"does not go with (\w+)=([\w.]+)", why)
    return f"`{found[1]}`" if found else why.partition(";")[0][:110]


def summary(made: Sequence[Row]) -> list[str]:
    """Return a line with the counts of ``made``, and one for each recipe that is not accepted."""
    total = count(made, on_recipe_stages)
    can = total.recipes - total.stock_cannot
    lines = [
        f"{total.recipes} recipes: {total.accepted} accepted; {total.stock_cannot} stock cannot "
        f"run, {total.unknown} not understood; of the {can} others than those that stock cannot "
        f"run {_share(total.accepted, can)} are accepted"
    ]
    for row in made:
        if row.unknown:
            lines.append(f"not understood: {row.name}: {row.unknown}")
        elif row.on_stages and row.on_stages.why_stock:
            lines.append(f"stock cannot run: {row.name}: {row.on_stages.why_stock}")
        elif row.on_stages and row.on_stages.why:
            lines.append(f"refused: {row.name}: {row.on_stages.why}")
    return lines
