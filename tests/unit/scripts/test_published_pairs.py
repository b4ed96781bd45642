"""Published pairs of one model with two parallel layouts."""

from __future__ import annotations

from scripts.published_pairs import Compared, read_pairs, summary


def test_both_sides_of_a_pair_train_the_same_model_on_the_same_gpus() -> None:
    pairs = read_pairs()
    assert len(pairs) == 9
    for first, second in pairs.values():
        assert first.recipe.model == second.recipe.model
        assert (first.recipe.gpu, first.recipe.gpus) == (second.recipe.gpu, second.recipe.gpus)
        for name in ("precision", "global_batch_size", "seq_length"):
            assert first.recipe.settings[name] == second.recipe.settings[name]
        assert first.recipe.settings != second.recipe.settings


def test_only_pairs_that_differ_are_counted() -> None:
    right, wrong, tie = Compared(1.2, 1.01), Compared(0.8, 1.3), Compared(1.01, 0.5)
    assert summary([right, wrong, tie]) == "differ by more than 2%: 1 of 2 in the right order"
