"""Tests that the numbers of README.md are those of the pages and commands that it names."""

from __future__ import annotations

import re

import pytest

from megatron_ext.search import best
from megatron_ext.search.effort import effort
from scripts.evaluation.recipes.readme import README, RECIPES_PAGE, headline, with_accepted
from scripts.readme_table import ROWS, TRAINED, Row, line_of, rows_of
from scripts.tables import part, row, with_part
from tests.helpers.combinations import nightly

GAINS = """
| m <= 2p | 33 | 1.140 [1.53] | 1.264 [1.72] | 31 | 26 | 14 |
| all | 210 | 1.041 [1.67] | 1.055 [1.85] | 139 | 64 | 30 |
"""


def test_the_headline_has_the_medians_of_the_recipes_page() -> None:
    """The headline of README has the medians of docs/recipes.md. README used to say 5.0, 6.0, 21.3
    and 33.2 % where the page said 4.1, 5.5, 14.0 and 26.4."""
    written = part(README.read_text(), "headline")
    assert " ".join(written.split()) == headline(RECIPES_PAGE.read_text())


def test_the_headline_follows_the_page() -> None:
    text = headline(GAINS)
    assert "On 210 public" in text and "median of 4.1 % from" in text and "gain 5.5 % (" in text
    with pytest.raises(ValueError, match="no row 'all' with gains"):
        headline("| m <= 2p | 33 | 1.140 [1.53] | 1.264 [1.72] |")


def test_a_part_is_written_between_its_marks() -> None:
    page = "a\n<!-- one: written by a script -->\nold\n<!-- end of one -->\nb\n"
    made = with_part(page, "one", "new")
    assert part(made, "one") == "new" and made.startswith("a\n") and made.endswith("-->\nb\n")
    with pytest.raises(ValueError, match="must have each of the marks"):
        with_part("a page", "one", "text")


def test_the_counts_of_recipes_are_those_of_their_page() -> None:
    """README's counts of recipes are those of docs/recipes.md.

    README used to say that 197 recipes are accepted, a day after 12 of these were found to have
    experts on more ranks than there are.
    """
    readme, page = README.read_text(), RECIPES_PAGE.read_text()
    assert with_accepted(readme, page) == readme
    row = "| all, own stages | 7 | 5 (71%) | 0 |"
    assert "Of 7 public recipes with a\npipeline 5 are [accepted" in with_accepted(readme, row)
    with pytest.raises(ValueError, match="no row 'all, own stages'"):
        with_accepted(readme, "")


@pytest.mark.parametrize(
    "of_table",
    [
        pytest.param(
            one,
            id=one.name,
            marks=[nightly("rows of the table without a search")] if one.is_slow else [],
        )
        for one in ROWS
    ],
)
def test_a_row_of_the_table_has_computed_figures(
    of_table: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers in a row of README's table are computed.

    The table used to give 2802 as Megatron's best step with a large vocabulary, where ``plan``
    finds 2174, and compared two steps of unequal microbatches with different baselines.
    """
    # searches as long as a user's, longer than those of other tests
    monkeypatch.setattr(best, "effort", effort)
    assert rows_of(README.read_text())[of_table.where] == line_of(of_table)


def test_the_table_has_all_rows_and_no_others() -> None:
    written = part(README.read_text(), "table").splitlines()[2:]
    assert len(written) == len(ROWS) + len(TRAINED)
    assert written[len(ROWS) :] == [row(cells).strip() for cells in TRAINED]


def test_each_row_names_its_baseline() -> None:
    """Each row of README's table names its baseline. Two rows used to have the numbers of
    Megatron's interleaved schedule without its name."""
    for line in part(README.read_text(), "table").splitlines()[2:]:
        baseline = line.split(" | ")[1]
        assert "several GPUs" in line or re.search(
            r"1F1B|`1f1b`|`interleaved`|stock Megatron", baseline
        )
