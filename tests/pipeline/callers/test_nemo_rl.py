"""Test of NeMo-RL's own policy steps under our schedules, compared with Megatron's schedule to the
last bit.

Compared are log-probabilities, losses, gradient norms and weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.combinations import nightly
from tests.helpers.nemo_rl_checkout import CHECKOUT
from tests.helpers.policy_runs import check_replicas, stocks_steps
from tests.helpers.ranks import ROOT

pytestmark = nightly("by day callers with batches like verl's: test_dynamic_batches.py")


@pytest.mark.parametrize(
    ("ranks", "schedules"),
    [(2, ["zb-h1", "zb-auto"]), (4, ["zb-h1"])],
    ids=["one pipeline", "two replicas"],
)
def test_nemo_rl_trains_to_its_own_numbers(
    ranks: int, schedules: list[str], tmp_path: Path
) -> None:
    assert CHECKOUT.is_dir(), (
        f"there is no checkout of NeMo-RL: git clone --depth 1 "
        f"https://github.com/NVIDIA-NeMo/RL {CHECKOUT.relative_to(ROOT)}"
    )
    # verl's packages include Megatron-Bridge and Ray, which NeMo-RL imports too
    by_rank = stocks_steps("nemo_rl_on_cpu", ranks, schedules, ("verl",), tmp_path)
    assert all(len(step["microbatches"]) == 12 for stock in by_rank for step in stock)
    if ranks == 4:
        check_replicas(by_rank, "microbatches")
