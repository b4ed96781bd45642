"""Test of packs in slices on four data-parallel replicas of a caller's model.

Megatron's data-parallel wrapper averages the gradients over the replicas.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import megatron_ext
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from tests.helpers.combinations import nightly
from tests.helpers.packed import sliced_packs_on_the_cpu
from tests.helpers.ranks import run_ranks, values
from tests.pipeline.training import test_packed_sequences as packed
from tests.pipeline.training.test_slices import assert_close_step
from tests.pipeline.training.test_slices_of_packs import PACKS


@pytest.fixture(autouse=True)
def _attention_over_documents() -> Iterator[None]:
    with sliced_packs_on_the_cpu():
        yield


@nightly("test_gradients_are_those_of_whole_packs has one replica and one pack a microbatch")
def test_four_replicas_of_two_packs_a_microbatch() -> None:
    """A caller's four replicas, each with microbatches of two packs in a row, have the gradients of
    whole rows."""
    rows = [[*PACKS[number % 5], *PACKS[(number + 2) % 5]] for number in range(8)]

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = packed.step(rows, replicas=4)
            for schedule in ("zb-h1", "zb-v"):
                with megatron_ext.install(
                    schedule=schedule,
                    slices="4",
                    slice_lengths="9,7,7,1",
                    join_slice_weights=schedule == "zb-v",
                ):
                    assert_close_step(packed.step(rows, replicas=4), expected)

    values(run_ranks(4 * packed.RANKS, on_rank))
