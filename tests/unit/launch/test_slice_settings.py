"""Tests of the settings --pipeline-slices, --pipeline-slice-lengths and
--pipeline-join-slice-weights."""

from __future__ import annotations

import pytest

from megatron_ext.config import PipelineConfig
from megatron_ext.schedule.slices import Lengths, Slices
from megatron_ext.written_settings import from_argv, from_environment


def test_flags_of_slices_make_one_option() -> None:
    line = "--pipeline-schedule zb-h1 --pipeline-slices 3 --pipeline-slice-lengths 8,5,3"
    assert from_argv(line.split()).options.slices == Slices(3, (8, 5, 3))
    config = PipelineConfig.parse(schedule="1f1b", slices="4", slice_lengths="balanced")
    assert config.options.slices == Slices(4, Lengths.BALANCED)
    assert PipelineConfig.parse(schedule="1f1b").options.slices == Slices()
    joined = from_argv([*line.split(), "--pipeline-join-slice-weights"]).options.slices
    assert joined == Slices(3, (8, 5, 3), joined_weights=True)
    variables = {"SCHEDULE": "zb-h1", "SLICES": "2", "JOIN_SLICE_WEIGHTS": "1"}
    given = from_environment({f"MEGATRON_EXT_{name}": value for name, value in variables.items()})
    assert given is not None and given.options.slices == Slices(2, joined_weights=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slices": "0"}, "--pipeline-slices 0: write a number from 1 on"),
        ({"slices": "four"}, "--pipeline-slices four: write a number"),
        ({"slices": "2", "slice_lengths": "long"}, "--pipeline-slice-lengths long: write even"),
        (
            {"slices": "2", "slice_lengths": "4,3,2"},
            "--pipeline-slice-lengths 4,3,2 has 3 lengths, and --pipeline-slices is 2",
        ),
        (
            {"slice_lengths": "balanced"},
            "--pipeline-slice-lengths balanced is given without --pipeline-slices",
        ),
        (
            {"join_slice_weights": True},
            "--pipeline-join-slice-weights is given without --pipeline-slices",
        ),
        (
            {"slices": "2", "vocab_parallel": "1"},
            "--pipeline-slices 2 does not go with --pipeline-vocab-parallel 1",
        ),
        ({"slices": "2", "post_validation": True}, "--pipeline-slices 2 does not go with"),
        ({"slices": "2", "costs": "profile"}, "--pipeline-slices 2 does not go with"),
        ({"slices": "2", "race": "zb-h1"}, "--pipeline-race .* does not go with --pipeline-slices"),
    ],
)
def test_refusals(settings: dict[str, str | bool], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineConfig.parse(schedule="1f1b", **settings)
