"""Tests that numbers of searches in README.md and docs/ are those that the code computes now.

docs/uneven-stages.md used to say that zb-auto, with an order made for a slow link, takes 1.09 times
as long as on equal links, where it takes 1.08 times as long. The number had been typed, and the
search had improved since.
"""

from __future__ import annotations

import pytest

from megatron_ext.search import best
from megatron_ext.search.effort import effort
from scripts.simulated_figures import (
    FIGURES,
    ROOT,
    SimulatedSentence,
    SimulatedTable,
)
from tests.helpers.combinations import nightly


@pytest.mark.search
@pytest.mark.parametrize(
    "simulated",
    [
        pytest.param(
            one,
            id=f"{one.page}: {one.name}",
            marks=[nightly("figures without a search")],
        )
        for one in FIGURES
        if one.is_slow
    ],
)
def test_a_page_has_the_figures_of_searches(
    simulated: SimulatedTable | SimulatedSentence, monkeypatch: pytest.MonkeyPatch
) -> None:
    # searches as long as a user's, longer than those of other tests
    monkeypatch.setattr(best, "effort", effort)
    page = (ROOT / simulated.page).read_text()
    assert simulated.written_into(page) == page, (
        f"to write it: python -m scripts.simulated_figures {simulated.page}"
    )


PAGE = "It takes 1245 of\nit, and 0.5 more. It takes nothing.\n"


def test_figures_of_a_sentence_are_replaced_across_lines() -> None:
    sentence = SimulatedSentence(
        "a.md", "a", "takes {} of it, and {} more.", lambda: ["7", "12.25"]
    )
    assert sentence.written_into(PAGE) == "It takes 7 of\nit, and 12.25 more. It takes nothing.\n"


@pytest.mark.parametrize("words", ["takes {} of them", "It takes"])
def test_a_sentence_that_was_reworded_is_an_error(words: str) -> None:
    """A sentence of a page that was reworded is an error. Otherwise its values would never change
    again."""
    with pytest.raises(ValueError, match=r"must have the sentence .* has it [02] times"):
        SimulatedSentence("a.md", "a", words, list).written_into(PAGE)
