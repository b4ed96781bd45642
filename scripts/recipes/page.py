"""docs/recipes.md, of what was counted."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence

from scripts.recipes.counting import LARGE_BUBBLE, Count, Row, Under, count
from scripts.recipes.feature import Feature
from scripts.recipes.gains_page import gains_section
from scripts.recipes.prospects import Prospect
from scripts.recipes.recipe import HERE
from scripts.recipes.tables import name_of
from scripts.recipes.tested import Evidence, Wanted, by_frequency, text_of
from scripts.recipes.vocabulary import GRADES, KINDS, OTHER_NAMES, SETTINGS
from scripts.tables import table

_HEAD = """# Recipes

<!-- written by scripts/recipe_coverage.py -->

How many of Megatron-Bridge's public recipes with a pipeline train under megatron_ext as they stand.
A recipe counts under the schedule with its own stages: zb-h1 for one chunk a rank, else
interleaved-zb with its own virtual stages, layout and group; and, as a second figure, under v-auto
with its layers divided anew.

- **Accepted**: Megatron's own validation and our refusals accept all of the recipe's settings, as
  in `megatron-ext doctor`, and the schedule is proved for its ranks, chunks and microbatches (zb-v
  is proved in place of v-auto, which would need a search). "After dropping" counts further recipes,
  which are accepted without one or two of their settings. Of the recipes that are not accepted,
  the last table has those that we refuse; stock Megatron cannot run the others.
- **Shown**: there is a test for each feature that the recipe switches on, under that kind of
  schedule, which compares it with stock Megatron. Grade A: Megatron's own code, to the last bit, on
  the CPU. Grade B: the same with a stand-in for a kernel. Grade C: a test for GPUs **that has not
  run yet**, of kernels of FP8 and FP4, CUDA graphs' capture and replay, Userbuffers, DeepEP and
  HybridEP, Mamba, DSA and Muon. A recipe has the grade of its worst feature. Every recipe has
  Transformer Engine's layers, so none is better than B.
- **Covered**: accepted and shown. A, B and C divide the covered recipes by grade: those of grade C
  wait for a GPU.

`python scripts/recipe_coverage.py --recipes FILE.json` counts those of another file, in any public
form; `--output` writes a page like this one for them, and `--json` all that is known of each.
Settings, dimensions and their sources are in `scripts/recipes/`; its `coverage.md` has the figures
by model, the grade of each setting, what no test shows, what stock cannot run, and the gains of
recipes with a vision tower.
"""

_DETAILS = """# Recipes in detail

<!-- written by scripts/recipe_coverage.py, behind docs/recipes.md -->
"""


_REFUSED = "## What is refused\n"
_TOWERS = "## Vision towers\n"
_ON_TOWERS = """One recipe of each public model with a vision tower (docs/uneven-stages.md),
with the tower and the language model trained, and with nothing but the projector trained. The tower
sees as many patches as the language model tokens. Gains are those of docs/recipes.md, with the
recipe's own recompute. Written by `python -m scripts.recipes.towers`.
"""
_PLANS = rf"^## What a plan would gain\n.*?(?=\n(?:{_TOWERS}|{_REFUSED}))"


def page(made: Sequence[Row], prospects: Sequence[Prospect] = (), plans: str | None = None) -> str:
    """Return the text of the page. Its section on gains of plans is ``plans`` if given, else made
    from ``prospects``."""
    parts = [
        _HEAD,
        "## How many\n",
        _totals(made),
        *filter(None, [plans or gains_section(prospects)]),
        _REFUSED,
        _refusals(made),
        *_unknown(made),
    ]
    return "\n".join(parts).rstrip("\n") + "\n"


def details(made: Sequence[Row], evidence: Evidence) -> str:
    """Return the tables behind the page: models, settings with their grades, vision towers."""
    parts = [
        _DETAILS,
        "## By model\n",
        _by_model(made),
        "## What recipes switch on\n",
        "The best grade under each kind of schedule, and the recipes that have it.\n",
        _features(made, evidence),
        "## What no test shows\n",
        _missing(made),
        "## What stock cannot run\n",
        _stock_cannot(made),
        "## What stands for what\n",
        rules(),
        *_towers(made),
    ]
    return "\n".join(parts)


def _towers(made: Sequence[Row]) -> list[str]:
    """Return the section on towers, of the models that recipes of ``made`` train; nothing if there
    are none."""
    names = {row.name.rpartition(":")[2].removesuffix("_config") for row in made}
    with (HERE / "towers.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["recipe"] in names]
    if not rows:
        return []
    columns = list(rows[0])
    return [_TOWERS, _ON_TOWERS, table(columns, [list(row.values()) for row in rows])]


def plans_of(text: str) -> str | None:
    """Return the section of a page's ``text`` on gains of plans; None if it has none."""
    found = re.search(_PLANS, text, re.M | re.S)
    return found[0] if found else None


def summary(made: Sequence[Row]) -> list[str]:
    """Return the counts of ``made`` in a line, and a line for each recipe that is not accepted."""
    total = count(made, own)
    can = total.recipes - total.stock_cannot
    lines = [
        f"{total.recipes} recipes: {total.accepted} accepted, {sum(total.tested.values())} shown, "
        f"{sum(total.covered.values())} covered; {total.stock_cannot} stock cannot run, "
        f"{total.unknown} not understood; of the {can} others than those that stock cannot run "
        f"{_share(total.accepted, can)} are accepted"
    ]
    for row in made:
        verdict = row.own.verdict if row.own else None
        if row.unknown:
            lines.append(f"not understood: {row.name}: {row.unknown}")
        elif verdict and verdict.why_stock:
            lines.append(f"stock cannot run: {row.name}: {verdict.why_stock}")
        elif verdict and verdict.why:
            lines.append(f"refused: {row.name}: {verdict.why}")
    return lines


def own(row: Row) -> Under | None:
    return row.own


def on_v(row: Row) -> Under | None:
    return row.v


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.0%})" if whole else "0"


def _figures(total: Count) -> list[object]:
    covered = sum(total.covered.values())
    return [
        total.recipes,
        _share(total.accepted, total.recipes),
        sum(total.tested.values()),
        f"**{_share(covered, total.recipes)}**",
        *(total.covered[grade] for grade in GRADES),
        total.after_dropping,
    ]


def _totals(made: Sequence[Row]) -> str:
    bubbly = [row for row in made if row.has_large_bubble]
    large = f"those with more than {LARGE_BUBBLE:.0%} of bubble"
    lines = [
        ["all, own stages", *_figures(count(made, own))],
        ["all, v-auto", *_figures(count(made, on_v))],
        [f"{large}, own stages", *_figures(count(bubbly, own))],
        [f"{large}, v-auto", *_figures(count(bubbly, on_v))],
    ]
    head = ["", "recipes", "accepted", "shown", "covered", "A", "B", "C", "after dropping"]
    return table(head, lines)


def _by_model(made: Sequence[Row]) -> str:
    models = Counter(row.recipe.model for row in made if row.recipe)
    lines = []
    for model, number in models.most_common():
        those = [row for row in made if row.recipe and row.recipe.model == model]
        figures = [count(those, under) for under in (own, on_v)]
        lines.append(
            [
                model,
                number,
                figures[0].accepted,
                sum(figures[0].covered.values()),
                figures[1].accepted,
                sum(figures[1].covered.values()),
            ]
        )
    return table(["model", "recipes", "accepted", "covered", "v-auto accepted", "covered"], lines)


def _refusals(made: Sequence[Row]) -> str:
    counts: dict[str, Counter[str]] = {}
    for row in made:
        for column, under in (("own", row.own), ("v", row.v)):
            if under and under.verdict.why and not under.verdict.why_stock:
                counts.setdefault(_short(under.verdict.why), Counter())[column] += 1
                if under.verdict.without:
                    counts[_short(under.verdict.why)][f"{column} without"] += 1
    lines = [
        [why, *(counts[why][key] for key in ("own", "own without", "v", "v without"))]
        for why in sorted(counts, key=lambda why: (-counts[why]["own"], why))
    ]
    head = ["refused setting", "own stages", "after dropping", "v-auto", "after dropping"]
    return table(head, lines)


def _short(why: str) -> str:
    """Return a reason without the parts that differ from recipe to recipe."""
    found = re.search(r"does not go with (\w+)=([\w.]+)", why)
    return f"`{found[1]}`" if found else why.partition(";")[0][:110]


def _missing(made: Sequence[Row]) -> str:
    lines: list[list[object]] = []
    for kind in KINDS:
        of_kind: dict[str, Sequence[Wanted]] = {}
        for row in made:
            under = row.v if kind == "v" else row.own
            if row.recipe and under and kind in ("v", row.recipe.kind):
                of_kind[row.name] = under.tested.missing
        for wanted, number, alone in by_frequency(of_kind):
            lines.append([kind, text_of(wanted), number, alone])
    if not lines:
        return "Nothing.\n"
    return table(["kind", "setting", "recipes", "that lack nothing else"], lines)


def _stock_cannot(made: Sequence[Row]) -> str:
    why = {row.name: row.own.verdict.why_stock for row in made if row.own}
    counts = Counter(text for text in why.values() if text)
    if not counts:
        return "Nothing.\n"
    lines = [
        [number, text, ", ".join(name_of(name) for name, own in why.items() if own == text)]
        for text, number in counts.most_common()
    ]
    return table(["recipes", "because", ""], lines)


def _unknown(made: Sequence[Row]) -> list[str]:
    lines = [[name_of(row.name), row.unknown] for row in made if row.unknown]
    return ["## What is not understood\n", table(["recipe", ""], lines)] if lines else []


def _features(made: Sequence[Row], evidence: Evidence) -> str:
    used = Counter(feature for row in made if row.recipe for feature in row.recipe.features)

    def grades(feature: Feature) -> list[str]:
        return [evidence.grade(kind, (feature,)) or "-" for kind in KINDS]

    lines = [[feature, used[feature], *grades(feature)] for feature in sorted(used)]
    others = [line for line in lines if set(line[2:]) != {"A"}]
    return (
        f"{len(lines) - len(others)} of {len(lines)} settings have A under each. The others:\n\n"
        f"{table(['', 'recipes', *KINDS], others)}"
    )


def rules() -> str:
    """Return the table of values that stand for others, and of settings that need no test."""
    lines = [[f"`{setting.name}`", setting.why] for setting in SETTINGS if setting.why]
    lines += [[f"`{name}`", f"is `{setting}`"] for name, setting in OTHER_NAMES.items()]
    return table(["setting", ""], lines)
