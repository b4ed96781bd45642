"""Tests of fine-tuning recipes with few microbatches: the median of our gain over Megatron's best
schedule does not fall."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.evaluation.recipes.evaluated import GAINS
from scripts.evaluation.recipes.few_microbatches import (
    ADAPTERS,
    FULL,
    LEAST_MEDIAN,
    FewMicrobatches,
    fallen_median,
    few_microbatches,
    few_microbatches_section,
    ratio_of,
)
from scripts.evaluation.recipes.public_form import read_recipes
from scripts.evaluation.recipes.readme import RECIPES_PAGE
from scripts.evaluation.recipes.recipe import RECIPES, Recipe, read_models, resolve
from scripts.tables import part

GAIN = FewMicrobatches("one", FULL, 8, 4, "1f1b", "interleaved:vpp=2", 1.2, "zb-v", 1.5)


@pytest.fixture(scope="module")
def recipes() -> list[Recipe]:
    """Fine-tuning recipes."""
    models, made = read_models(), []
    for name, raw in read_recipes(RECIPES).items():
        if "_sft_" in name or "_peft_" in name:
            # a recipe whose settings only Megatron itself supports is skipped
            with contextlib.suppress(ValueError):
                made.append(resolve(name, raw, models))
    return made


def test_the_page_has_the_medians_and_they_have_not_fallen(recipes: list[Recipe]) -> None:
    gains = few_microbatches(recipes, GAINS)
    assert Counter(gain.kind for gain in gains) == {FULL: 15, ADAPTERS: 4}
    assert part(RECIPES_PAGE.read_text(), "few microbatches") == (
        few_microbatches_section(gains).strip()
    )
    assert fallen_median(gains) is None
    assert ratio_of(gains, ADAPTERS) < ratio_of(gains, FULL)


def test_a_fallen_median_is_reported() -> None:
    fallen = [replace(GAIN, our_gain=1.2 * LEAST_MEDIAN - 0.01), replace(GAIN, kind=ADAPTERS)]
    assert "the median is 1.06" in str(fallen_median(fallen))
    assert fallen_median([GAIN, *fallen]) is None


def test_a_gain_that_is_missing_is_the_one_before_it(recipes: list[Recipe], tmp_path: Path) -> None:
    """In the file of gains, an empty cell means that its step is no better than the step in the
    cell to its left. The script reads the cell as that step."""
    header, *rows = GAINS.read_text().splitlines(keepends=True)
    (recipe,) = (one for one in recipes if one.short_name.startswith("nemotron_3_ultra_sft_192gpu"))
    row = next(row for row in rows if row.startswith(recipe.short_name))
    file = tmp_path / "gains.csv"
    file.write_text(header + row)
    (gain,) = few_microbatches([recipe], file)
    assert gain.ours == gain.stock and gain.ratio == 1 < gain.our_gain
    name, ranks, microbatches, own, seconds, size, *_ = row.split(",")
    file.write_text(header + ",".join([name, ranks, microbatches, own, seconds, size, *[""] * 6]))
    (gain,) = few_microbatches([recipe], file)
    assert gain.stock == gain.ours == "1f1b" and gain.stock_gain == gain.ratio == 1
