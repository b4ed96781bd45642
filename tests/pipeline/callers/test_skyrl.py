"""Test of SkyRL's own policy steps under our schedules, compared with Megatron's schedule to the
last bit.

Compared are log-probabilities, losses, gradient norms and weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.caller_packages import prepare
from tests.helpers.combinations import nightly
from tests.helpers.ranks import ROOT

pytestmark = nightly("by day callers with batches like verl's: test_dynamic_batches.py")


@pytest.mark.parametrize(
    ("ranks", "schedules"),
    [(2, ["zb-h1", "zb-auto"]), (4, ["zb-h1"])],
    ids=["one pipeline", "two replicas"],
)
def test_skyrl_trains_to_its_own_numbers(ranks: int, schedules: list[str], tmp_path: Path) -> None:
    folders = []
    for caller in ("verl", "skyrl"):  # verl's packages include what SkyRL's worker imports
        packages, problem = prepare(caller)
        assert not problem, f"{caller}'s packages cannot be installed with pip: {problem}"
        folders.append(str(packages))
    path = [*folders, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # The variable that selects the night's tests is no setting of a training, so megatron_ext.auto
    # would refuse it.
    environment = {
        name: value for name, value in os.environ.items() if name != "MEGATRON_EXT_NIGHTLY"
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tests.helpers.skyrl_on_cpu", str(tmp_path), "stock", *schedules],
        cwd=ROOT,
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "SKYRL_RANKS": str(ranks),
        },
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    by_rank = []
    for rank in range(ranks):
        stock, *others = (
            json.loads((tmp_path / f"{name}.json.{rank}").read_text())
            for name in ("stock", *schedules)
        )
        assert len({step["log_probs"] for step in stock}) == len(stock) == 3
        assert len({tuple(step["weights"]) for step in stock}) == 3, "it does not learn"
        assert all(step["microbatches"] == [6, 6] and step["norm"] > 0 for step in stock)
        for schedule, other in zip(schedules, others, strict=True):
            assert other == stock, f"{schedule} on rank {rank}"
        by_rank.append(stock)
    if ranks == 4:  # ranks 0 and 1 have the first stage of a replica each
        for first, second in zip(*by_rank[:2], strict=True):
            assert first["weights"] == second["weights"], "replicas part"
            assert first["log_probs"] != second["log_probs"], "replicas have the same data"
    for schedule in schedules:
        assert ran.stdout.count(f"megatron_ext: schedule {schedule} is installed") == 1
        assert f"megatron_ext: {schedule} on 2 ranks" in ran.stdout
