"""Test of SkyRL's own policy steps under our schedules, compared with Megatron's schedule to the
last bit.

Compared are log-probabilities, losses, gradient norms and weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.combinations import nightly
from tests.helpers.policy_runs import check_replicas, stocks_steps

pytestmark = nightly("by day callers with batches like verl's: test_dynamic_batches.py")


@pytest.mark.parametrize(
    ("ranks", "schedules"),
    [(2, ["zb-h1", "zb-auto"]), (4, ["zb-h1"])],
    ids=["one pipeline", "two replicas"],
)
def test_skyrl_trains_to_its_own_numbers(ranks: int, schedules: list[str], tmp_path: Path) -> None:
    # verl's packages include what SkyRL's worker imports
    by_rank = stocks_steps("skyrl_on_cpu", ranks, schedules, ("verl", "skyrl"), tmp_path)
    assert all(step["microbatches"] == [6, 6] for stock in by_rank for step in stock)
    if ranks == 4:
        check_replicas(by_rank, "log_probs")
