"""Allocations of real layers and the real runtime on the meta device (`scripts.fragmentation`)."""

from __future__ import annotations

import pytest

from scripts import fragmentation
from scripts.fragmentation import allocations, replay

WIDTH, SEQUENCE = 256, 512
SMALL = {
    "num_layers": 8,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "ffn_hidden_size": 2 * WIDTH,
}


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragmentation, "MODELS", {"small": (SMALL, 64)})
    monkeypatch.setattr(fragmentation, "SEQUENCE", SEQUENCE)
    monkeypatch.setattr(fragmentation, "STEPS", 1)


def test_ranks_of_1f1b_hold_what_their_microbatches_do() -> None:
    """Rank 0 has 4 microbatches under way, rank 2 has 2. All is given back, but for parts of what
    the step returns and of tables that microbatches share."""
    ranks = [replay(events) for events in allocations("small", "1f1b")]
    tensor = 2 * SEQUENCE * WIDTH  # bytes; a layer of a microbatch keeps more than ten of these
    assert ranks[0].max_requested - ranks[2].max_requested > 2 * 2 * 10 * tensor
    for rank in ranks:
        assert rank.requested < tensor
        assert rank.max_reserved >= rank.max_requested > 10 * tensor


def test_what_has_left_for_the_host_is_no_memory_of_the_device() -> None:
    """Half of the activations leave; their buffers on the host had been counted as the device's."""
    stays, leaves = (
        max(replay(events).max_requested for events in allocations("small", row))
        for row in ("zb-v", "zb-v, offload half")
    )
    assert leaves < 0.8 * stays
