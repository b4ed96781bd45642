"""Other projects' policy steps under several schedules, compared with those under Megatron's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.caller_packages import prepare
from tests.helpers.ranks import ROOT


def stocks_steps(
    stand_in: str, ranks: int, schedules: Sequence[str], callers: Sequence[str], folder: Path
) -> list[list[dict[str, Any]]]:
    """Return the steps of each rank under Megatron's schedule, after a check that those under
    ``schedules`` are bitwise the same.

    Args:
        stand_in: module below tests.helpers that runs the steps and writes them into ``folder``.
        ranks: number of ranks, of which two are a pipeline.
        callers: names of the requirements lists in scripts/callers whose packages the stand-in
            imports.
    """
    path = []
    for caller in callers:
        packages, problem = prepare(caller)
        assert not problem, f"{caller}'s packages cannot be installed with pip: {problem}"
        path.append(str(packages))
    path += [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # MEGATRON_EXT_NIGHTLY, which selects the night's tests, is no setting of a training, so
    # megatron_ext.auto would refuse the variable.
    environment = {
        name: value for name, value in os.environ.items() if name != "MEGATRON_EXT_NIGHTLY"
    }
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.helpers.{stand_in}", str(folder), "stock", *schedules],
        cwd=ROOT,
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "POLICY_RANKS": str(ranks),
        },
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    by_rank = []
    for rank in range(ranks):
        stock, *others = (
            json.loads((folder / f"{name}.json.{rank}").read_text())
            for name in ("stock", *schedules)
        )
        assert len({step["log_probs"] for step in stock}) == len(stock) == 3
        assert len({tuple(step["weights"]) for step in stock}) == 3, "it does not learn"
        assert all(step["norm"] > 0 for step in stock)
        for schedule, other in zip(schedules, others, strict=True):
            assert other == stock, f"{schedule} on rank {rank}"
        by_rank.append(stock)
    for schedule in schedules:
        assert ran.stdout.count(f"megatron_ext: schedule {schedule} is installed") == 1
        assert f"megatron_ext: {schedule} on 2 ranks" in ran.stdout
    return by_rank


def check_replicas(by_rank: Sequence[Sequence[dict[str, Any]]], of_data: str) -> None:
    """Check, with four ranks, that both replicas have the same weights and different data. The
    results with the key ``of_data`` depend on the data."""
    # Ranks 0 and 1 each have the first stage of one replica.
    for first, second in zip(*by_rank[:2], strict=True):
        assert first["weights"] == second["weights"], "replicas part"
        assert first[of_data] != second[of_data], "replicas have the same data"
