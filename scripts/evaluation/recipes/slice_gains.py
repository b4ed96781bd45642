"""Estimated gains of slices for fine-tuning recipes whose pipelines wait long.

The best step in slices is compared with the best step of whole sequences, any schedule, layout,
recompute and number of virtual stages, as docs/recipe-gains.csv has it.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from megatron_ext.compile.registry import choose
from megatron_ext.planner.layouts.layout import Layout, evenly
from megatron_ext.planner.layouts.minimax import least_slowest_stage
from megatron_ext.planner.layouts.stage_figures import StageFigures
from megatron_ext.planner.layouts.work import Evaluated, Work, evaluate
from megatron_ext.planner.limits import least_step
from megatron_ext.planner.long_sequences import COUNTS, WORTH_SLICES
from megatron_ext.schedule.slices import Lengths, Slices
from scripts.evaluation.recipes.gains import PROCESSES, Configuration, allowed_bytes_of, works_of
from scripts.evaluation.recipes.recipe import Recipe
from scripts.tables import table

# Least waiting time of the ranks as a share of a step, computed as (p - 1) / (v m).
LEAST_WAIT = 0.1
# Least median of the step time without slices as a multiple of that with slices, for full
# fine-tuning with fewer microbatches than ranks; a trial of slices of packed sequences found 1.63.
LEAST_MEDIAN = 1.5
_SPECS = ("1f1b", "zb-h1", "zb-v")
_COLUMNS = (
    *("recipe", "class", "ranks", "microbatches", "tokens", "best without slices", "in slices"),
    *("gain of slices", "schedule", "slices", "joined W", "why no figure", "why not"),
)
CLASSES = ("m < p", "m >= p", "LoRA")


@dataclass(frozen=True)
class SliceGain:
    """Gain of slices of sequences for a recipe.

    Attributes:
        kind: one of `CLASSES`.
        tokens: tokens of a sequence.
        uncut: seconds of the recipe's own step, divided by those of the best step of whole
            sequences; None if it is not planned.
        sliced: seconds of the recipe's own step, divided by those of the best step in slices; None
            if it is not planned, or no step in slices fits.
        made: the schedule and the number of slices of the best step in slices, and whether their W
            are joined.
        why_no_plan: why there is no step in slices; "" if there is one.
        why_not: why the recipe cannot train in slices; "" if it can.
    """

    recipe: str
    kind: str
    ranks: int
    microbatches: int
    tokens: int
    uncut: float | None
    sliced: float | None
    made: tuple[str, int, bool]
    why_no_plan: str
    why_not: str

    @property
    def ratio(self) -> float | None:
        """Seconds of the best step of whole sequences over those of the best step in slices."""
        return None if self.uncut is None or self.sliced is None else self.sliced / self.uncut

    @property
    def is_recommended(self) -> bool:
        """Whether `plan` would recommend slices."""
        return not self.why_not and self.ratio is not None and self.ratio >= 1 + WORTH_SLICES


def waits_long(recipe: Recipe) -> bool:
    """Return whether ``recipe`` fine-tunes a model whose ranks wait long under Megatron's schedule.

    They wait long if they wait for `LEAST_WAIT` of the time of their passes, at equal stage times.
    """
    bubble = recipe.bubble
    is_tuning = re.search("_(sft|peft)_", recipe.name) is not None
    return is_tuning and bubble is not None and bubble / (1 - bubble) >= LEAST_WAIT


def microbatches_of(recipe: Recipe) -> int:
    assert recipe.parallel_copies is not None
    at_once = recipe.parallel_copies * recipe.settings["micro_batch_size"]
    return int(recipe.settings["global_batch_size"] // at_once)


def class_of(recipe: Recipe) -> str:
    if "_peft_" in recipe.name:
        return "LoRA"
    return "m < p" if microbatches_of(recipe) < recipe.ranks else "m >= p"


def read_whole_gains(file: Path) -> dict[tuple[str, int, int], float]:
    """Return the best gain of whole sequences by recipe, ranks and microbatches."""
    with file.open(newline="") as lines:
        return {
            (row["recipe"], int(row["ranks"]), int(row["microbatches"])): float(
                (row["gain of all"] or row["stock's gain"] or "1").rstrip("*")
            )
            for row in csv.DictReader(lines)
        }


def best_in_slices(configuration: Configuration) -> tuple[float, Evaluated]:
    """Return the gain of the shortest step in slices over the recipe's own command, and that step.

    The layers are balanced over the stages, or placed as in the command if that does not fit. The
    shortest step also decides which layers are recomputed, and whether W are joined.

    Raises:
        ValueError: the recipe's own command has no schedule, or no step in slices is possible.
    """
    works = works_of(configuration)
    baseline = evaluate(
        works[0], configuration.schedule, Layout(configuration.layers), search=False
    )
    bound = max(allowed_bytes_of(configuration, works[0]), baseline.fullest)
    best, refusals = None, Counter[str]()
    for work, spec, count, joined in product(works, _SPECS, COUNTS, (False, True)):
        if joined and not choose(spec).traits.splits_backward:
            continue
        cut = replace(work, slices=Slices(count, Lengths.BALANCED, joined))
        for layout in _layouts(configuration, work, spec):
            try:
                if best is not None and least_step(cut.variant(spec, layout)) >= best.seconds:
                    break
                made = evaluate(cut, spec, layout, allowed_bytes=bound, search=False)
            except ValueError as error:  # the schedule does not fit into the memory
                refusals[str(error)] += 1
                continue
            if best is None or made.seconds < best.seconds:
                best = made
            break
    if best is None:
        why = max(refusals, key=refusals.__getitem__, default="there are fewer layers than stages")
        raise ValueError(f"no step in slices is possible: {why}")
    return baseline.seconds / best.seconds, best


def _layouts(configuration: Configuration, work: Work, spec: str) -> list[Layout]:
    """Return the layouts to try: balanced stages, and a second layout for the case that these do
    not fit. That is the layout of the recipe's own command if it has as many stages, otherwise an
    even one. The list is empty if there are fewer layers than stages."""
    layers, placement = len(configuration.model.layers), choose(spec).place(configuration.ranks)
    if placement.stages > layers:
        return []
    recipe_layout = Layout(configuration.layers)
    if recipe_layout.stages != placement.stages:
        recipe_layout = evenly(layers, placement.stages)
    balanced = least_slowest_stage(layers, placement, StageFigures(work))
    return list(dict.fromkeys([balanced, recipe_layout]))


# Gain, schedule, number of slices and whether their W are joined; or the reason why there are none.
Found = tuple[float, str, int, bool] | str


def _found(configuration: Configuration) -> Found:
    try:
        gain, made = best_in_slices(configuration)
    except ValueError as error:
        return " ".join(str(error).split())
    report = made.candidate.report
    return gain, made.schedule, report.slices, report.options.slices.joined_weights


def slice_gains(
    recipes: Sequence[Recipe],
    configurations: Mapping[str, Configuration | str],
    why_not: Mapping[str, str],
    uncut: Mapping[tuple[str, int, int], float],
) -> list[SliceGain]:
    """Return the gain of each of ``recipes``.

    Args:
        configurations: the configuration of each recipe by the recipe's name, or why it is not
            known.
        why_not: why a recipe cannot train in slices, by its name; recipes that can are absent.
        uncut: the gains of whole sequences, as `read_whole_gains` returns them.
    """
    planned = [one for one in configurations.values() if isinstance(one, Configuration)]
    planned = sorted(dict.fromkeys(planned), key=lambda c: c.ranks * c.microbatches, reverse=True)
    with get_context("spawn").Pool(PROCESSES) as pool:
        found = dict(zip(planned, pool.map(_found, planned, chunksize=1), strict=True))
    made = []
    for recipe in recipes:
        configuration, microbatches = configurations[recipe.name], microbatches_of(recipe)
        one = found[configuration] if isinstance(configuration, Configuration) else configuration
        why_no_plan = one if isinstance(one, str) else ""
        gain, spec, count, joined = (None, "", 0, False) if isinstance(one, str) else one
        made.append(
            SliceGain(
                recipe.short_name,
                class_of(recipe),
                recipe.ranks,
                microbatches,
                int(recipe.settings["seq_length"]),
                uncut.get((recipe.short_name, recipe.ranks, microbatches)),
                gain,
                (spec, count, joined),
                why_no_plan,
                why_not.get(recipe.name, ""),
            )
        )
    return sorted(made, key=lambda gain: (CLASSES.index(gain.kind), -(gain.ratio or 0)))


def slices_section(gains: Iterable[SliceGain]) -> str:
    """Return the table of gains by class of recipes.

    Below it are the reasons why recipes with fewer microbatches than ranks have no figure.
    """
    gains, rows = list(gains), []
    for kind in CLASSES:
        of_class = [gain for gain in gains if gain.kind == kind]
        ratios = [gain.ratio for gain in of_class if gain.ratio is not None]
        spread = f"{median(ratios):.2f} [{min(ratios):.2f} to {max(ratios):.2f}]" if ratios else ""
        rows.append(
            [
                kind,
                len(of_class),
                len(ratios),
                spread,
                sum(not (gain.why_no_plan or gain.why_not) for gain in of_class),
                sum(gain.is_recommended for gain in of_class),
            ]
        )
    headings = ("class", "recipes", "planned", "gain of slices", "can train", "recommended")
    without = [
        f"- `{gain.recipe}`: {gain.why_no_plan or 'its whole sequences are not planned'}"
        for gain in gains
        if gain.kind == "m < p" and gain.ratio is None
    ]
    text = table(headings, rows)
    if without:
        text += "\nRecipes with m < p that have no figure:\n\n" + "\n".join(without) + "\n"
    return text


def slices_table(gains: Iterable[SliceGain]) -> str:
    """Return the gain of each recipe, as CSV."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(_COLUMNS)
    for gain in gains:
        figures = [
            "" if figure is None else f"{figure:.3f}"
            for figure in (gain.uncut, gain.sliced, gain.ratio)
        ]
        start = [gain.recipe, gain.kind, gain.ranks, gain.microbatches, gain.tokens]
        spec, count, joined = gain.made
        made = [spec, count or "", "yes" if joined else ""]
        lines.writerow([*start, *figures, *made, gain.why_no_plan, gain.why_not])
    return text.getvalue()


def broken_bar(gains: Iterable[SliceGain]) -> str | None:
    """Return how the bar on the median gain of recipes with m < p is broken; None if it is not."""
    ratios = [gain.ratio for gain in gains if gain.kind == "m < p" and gain.ratio is not None]
    found = median(ratios) if ratios else 0.0
    if found >= LEAST_MEDIAN:
        return None
    return f"gain of slices where m < p: the median is {found:.2f}, less than {LEAST_MEDIAN}"
