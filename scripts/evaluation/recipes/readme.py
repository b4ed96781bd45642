"""Numbers of docs/recipes.md in README.md: its headline, and how many recipes are accepted.

A number has one source. README repeats the numbers of docs/recipes.md, so they are copied by this
script, and a test compares the two.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from scripts.tables import with_part

_ROOT = Path(__file__).parents[3]
README, RECIPES_PAGE = _ROOT / "README.md", _ROOT / "docs" / "recipes.md"
_HEADLINE = "headline"
_WIDTH = 120


def headline(page: str) -> str:
    """Return the sentence on public configurations, with the numbers of ``page``.

    ``page`` is the text of docs/recipes.md.

    Raises:
        ValueError: the page has no table of gains.
    """
    number, *of_all = _medians(page, "all")
    few, *of_few = _medians(page, "m <= 2p")
    stock, ours, stock_few, ours_few = (f"{gain * 100:.1f} %" for gain in (*of_all, *of_few))
    return (
        f"Often not: tuned virtual stages and many microbatches leave little bubble. On {number:g} "
        f"public configurations Megatron's own schedules gain a median of {stock} from another "
        f"layout of the layers, and layouts and our schedules together gain {ours} "
        f"([estimated](docs/recipes.md), `python -m scripts.evaluation recipes`); on the {few:g} "
        f"with at most two microbatches a rank the medians are {stock_few} and {ours_few}."
    )


def _medians(page: str, row: str) -> tuple[int, float, float]:
    """Return the numbers in ``row`` of the table of gains.

    They are the number of configurations, and the median gains with Megatron's schedules and with
    all schedules.
    """
    cells = rf"^\| {re.escape(row)} \| (\d+) \| ([\d.]+) \[.*?\| ([\d.]+) \["
    found = re.search(cells, page, re.M)
    if found is None:
        raise ValueError(f"docs/recipes.md has no row {row!r} with gains")
    return int(found[1]), float(found[2]) - 1, float(found[3]) - 1


def accepted(page: str) -> tuple[int, int]:
    """Return how many recipes docs/recipes.md counts, and how many of them are accepted.

    ``page`` is the text of docs/recipes.md.

    Raises:
        ValueError: the page has no such row.
    """
    found = re.search(r"^\| all, own stages \| (\d+) \| (\d+) \(", page, re.M)
    if found is None:
        raise ValueError("docs/recipes.md has no row 'all, own stages'")
    return int(found[1]), int(found[2])


# Sentence of README.md about accepted recipes, whose numbers this module writes.
_ACCEPTED = re.compile(r"(Of )\d+( public recipes with a\s+pipeline )\d+( are)")


def with_accepted(readme: str, page: str) -> str:
    """Return the text ``readme`` with the numbers of ``page`` on accepted recipes."""
    recipes, number = accepted(page)
    text, count = _ACCEPTED.subn(rf"\g<1>{recipes}\g<2>{number}\g<3>", readme)
    assert count == 1, "README.md has no sentence on accepted recipes"
    return text


def write_headline() -> None:
    """Write the median gains and the counts of docs/recipes.md into README.md."""
    page = RECIPES_PAGE.read_text()
    text = textwrap.fill(headline(page), _WIDTH, break_on_hyphens=False)
    made = with_part(README.read_text(), _HEADLINE, text)
    README.write_text(with_accepted(made, page))
