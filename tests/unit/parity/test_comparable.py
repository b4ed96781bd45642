"""Tests of the conditions under which `megatron-ext parity` compares two runs at all."""

from __future__ import annotations

import pytest

from megatron_ext.recordings.comparable import refusal

STOCK = {"hidden_dropout": 0.0, "attention_dropout": 0.1}
SLICED = STOCK | {"pipeline_slices": 4}


@pytest.mark.parametrize(
    ("other", "cut"),
    [
        (STOCK, "whole sequences"),
        (STOCK | {"pipeline_slices": 1}, "whole sequences"),
        (SLICED | {"pipeline_slices": "8"}, "--pipeline-slices 8"),
        (
            SLICED | {"pipeline_slice_lengths": "balanced"},
            "--pipeline-slices 4 --pipeline-slice-lengths balanced",
        ),
    ],
)
def test_dropout_draws_other_numbers_in_other_slices(other: dict[str, object], cut: str) -> None:
    why = refusal(other, SLICED, "the commands")
    assert why == (
        f"the commands cannot be compared: with {cut} and --pipeline-slices 4 dropout draws other "
        f"numbers; give both commands --hidden-dropout 0 --attention-dropout 0"
    )
    without = {"attention_dropout": 0.0}
    assert refusal(other | without, SLICED | without, "the commands") is None


def test_the_same_slices_are_compared() -> None:
    assert refusal(SLICED, SLICED, "the commands") is None
    assert refusal(STOCK, STOCK, "the commands") is None
