"""verl's own PPO steps under our schedules: losses, log-probabilities by microbatch and weights are
those under Megatron's own schedule, to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts.caller_packages import prepare
from tests.helpers.combinations import nightly
from tests.helpers.ranks import ROOT

# verl leaves the making of models to one of these.
BRIDGES = ("mbridge", "megatron-bridge")


@dataclass(frozen=True)
class Training:
    """Results of a training by schedule, and what its ranks printed."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    printed: str = ""


@pytest.fixture(scope="module")
def packages() -> str:
    """The folder with verl; skips the test if it cannot be had."""
    folder, problem = prepare("verl")
    if problem:
        pytest.skip(f"verl cannot be installed with pip: {problem}")
    return str(folder)


def train(packages: str, folder: Path, bridge: str, *schedules: str, **model: Any) -> Training:
    path = [packages, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # The variable that makes it night is no setting, which megatron_ext.auto refuses.
    environment = {
        name: value for name, value in os.environ.items() if name != "MEGATRON_EXT_NIGHTLY"
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tests.helpers.verl_on_cpu", str(folder), bridge, *schedules],
        cwd=ROOT,
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "VERL_MODEL": json.dumps(model),
        },
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = {
        schedule: json.loads((folder / f"{schedule}.json").read_text()) for schedule in schedules
    }
    return Training(results, ran.stdout)


def assert_as_stock(training: Training) -> None:
    stock = training.results["stock"]
    counts = {len(microbatches) for microbatches in stock["microbatches"]}
    assert len(counts) > 2, (
        f"verl's batches have {counts} microbatches: their numbers are to differ"
    )
    changed = [name for name, digest in stock["after"].items() if digest != stock["before"][name]]
    assert len(changed) == len(stock["after"]), "it does not learn"
    for schedule, result in training.results.items():
        for name, value in result.items():
            assert value == stock[name], f"{name} under {schedule}"
        if schedule != "stock":
            assert training.printed.count(f"megatron_ext: schedule {schedule} is installed") == 1
            assert f"megatron_ext: {schedule} on 2 ranks" in training.printed


def test_verl_trains_to_its_own_numbers_under_a_v(packages: str, tmp_path: Path) -> None:
    """Each batch has as many microbatches as under Megatron's schedule, an odd number too."""
    assert_as_stock(train(packages, tmp_path, "mbridge", "stock", "zb-v"))


@nightly("by day under zb-v, with mbridge")
@pytest.mark.parametrize("bridge", BRIDGES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_verl_trains_to_its_own_numbers(
    bridge: str, tied: bool, packages: str, tmp_path: Path
) -> None:
    schedules: tuple[str, ...] = ("stock", "zb-h1", "zb-v", "v-auto")
    if tied and bridge == "megatron-bridge":
        # Its models start with unequal copies of a tied embedding, which a V refuses in one line.
        schedules = ("stock", "zb-h1")
    assert_as_stock(train(packages, tmp_path, bridge, *schedules, tie_word_embeddings=tied))
