"""Tests of the gains of recipes by slices of sequences: their classes, the best step with slices,
and the table."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.planner.candidate import Variant
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.work import Work, evaluate
from scripts.evaluation.recipes import slice_gains as slice_gains_module
from scripts.evaluation.recipes.evaluated import GAINS
from scripts.evaluation.recipes.gains import works_of
from scripts.evaluation.recipes.public_form import read_recipes
from scripts.evaluation.recipes.recipe import RECIPES, read_models, resolve
from scripts.evaluation.recipes.slice_gains import (
    SliceGain,
    best_in_slices,
    broken_bar,
    class_of,
    read_whole_gains,
    slices_section,
    slices_table,
    waits_long,
)
from tests.unit.scripts.test_recipe_gains import CONFIGURATION

GAIN = SliceGain("one", "m < p", 16, 4, 2048, 1.5, 2.4, ("zb-h1", 2, True), "", "")


def test_recipes_that_wait_long_are_the_trials() -> None:
    """The 29 recipes whose ranks wait long are the ones that an experiment found: 6 with LoRA, 8
    others with fewer microbatches than ranks (Megatron refuses three of these), and 15 others with
    at least as many microbatches as ranks."""
    models = read_models()
    recipes = []
    for name, raw in read_recipes(RECIPES).items():
        if "_sft_" in name or "_peft_" in name:
            try:
                recipes.append(resolve(name, raw, models))
            except ValueError:  # a recipe whose settings only Megatron itself supports is skipped
                continue
    waiting = [recipe for recipe in recipes if waits_long(recipe)]
    classes = Counter(map(class_of, waiting))
    assert classes == {"LoRA": 6, "m < p": 8, "m >= p": 15}
    whole = read_whole_gains(GAINS)
    assert whole["exaone_moe_2_0_750b_a37_sft_512gpu_h100_bf16", 16, 4] > 1.5


def test_the_best_step_in_slices_is_shorter_where_there_are_few_microbatches() -> None:
    one = replace(CONFIGURATION, microbatches=1, execution=replace(CONFIGURATION.execution))
    wide = replace(one.model, hidden_size=8192, ffn_hidden_size=32768, num_attention_heads=64)
    one = replace(one, model=wide)
    gain, made = best_in_slices(one)
    own = evaluate(works_of(one)[0], one.schedule, Layout(one.layers), search=False)
    assert gain == pytest.approx(own.seconds / made.seconds) and gain > 1.1
    assert made.candidate.report.slices > 1


def test_a_schedule_that_cannot_be_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one schedule cannot be built, such as a V of more stages than a layout has, the other
    schedules are still compared. It used to end the comparison of all schedules, and the recipe had
    no number."""
    variant_of = Work.variant

    def variant(work: Work, spec: str, *rest: Any) -> Variant:
        if spec == "1f1b" and work.slices.count > 1:
            raise ValueError("no such problem")
        return variant_of(work, spec, *rest)

    monkeypatch.setattr(Work, "variant", variant)
    _, made = best_in_slices(replace(CONFIGURATION, microbatches=1))
    assert made.schedule.startswith("zb")
    monkeypatch.setattr(slice_gains_module, "_SPECS", ("1f1b",))
    with pytest.raises(ValueError, match="no step in slices is possible: no such problem"):
        best_in_slices(replace(CONFIGURATION, microbatches=1))


def test_the_table_has_classes_and_says_what_cannot_train() -> None:
    hybrid = replace(GAIN, recipe="two", sliced=3.0, why_not="a hybrid model carries a state")
    slow = replace(GAIN, recipe="three", kind="m >= p", sliced=1.53)
    unknown = replace(
        GAIN, recipe="four", uncut=None, sliced=None, made=("", 0, False), why_no_plan="no GPU"
    )
    gains = [GAIN, hybrid, slow, unknown]
    lines = slices_section(gains).splitlines()
    assert lines[2] == "| m < p | 3 | 2 | 1.80 [1.60 to 2.00] | 1 | 1 |"
    assert lines[3] == "| m >= p | 1 | 1 | 1.02 [1.02 to 1.02] | 1 | 0 |"
    assert lines[-1] == "- `four`: no GPU"
    rows = list(csv.DictReader(io.StringIO(slices_table(gains))))
    assert [row["gain of slices"] for row in rows] == ["1.600", "2.000", "1.020", ""]
    assert [row["joined W"] for row in rows] == ["yes", "yes", "yes", ""]
    assert [bool(row["why not"]) for row in rows] == [False, True, False, False]
    assert [row["why no figure"] for row in rows] == ["", "", "", "no GPU"]
    assert broken_bar(gains) is None
    assert "the median is 1.40" in (broken_bar([replace(GAIN, sliced=2.1)]) or "")
