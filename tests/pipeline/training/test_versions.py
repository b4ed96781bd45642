"""Runs chosen tests under another version of Megatron than the installed one.

That version is fetched into a folder of its own, and comes before the installed one on the path of
a separate process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.combinations import nightly
from tests.helpers.fetched import fetched
from tests.helpers.ranks import ROOT

VERSION = "0.18.2"

TESTS = (
    "tests/patches/versions/test_installation.py::test_every_binding_is_changed_and_put_back",
    "tests/pipeline/training/test_parity.py::test_no_flag_means_stock",
    "tests/pipeline/training/test_placements.py::test_resumed_training_is_stock_to_the_last_bit[pp2-zb-v]",
    "tests/pipeline/training/test_checkpoints.py::test_states_behind_padding[zb-v]",
    "tests/pipeline/callers/test_callers.py::test_gradients_and_losses_are_stocks[zb-h1-async-True]",
    *(
        f"tests/pipeline/training/test_parity.py::test_resumed_training_is_stock_to_the_last_bit[{case}]"
        for case in ("pp2-tied-1f1b", "pp2-tied-zb-h1")
    ),
    "tests/pipeline/training/test_placements.py::test_dropout_is_that_of_stocks_interleaving",
    "tests/pipeline/training/test_placements.py::test_saved_on_a_v_and_resumed_elsewhere[None]",
)


@pytest.fixture(scope="module")
def other_megatron() -> Path:
    """Return the folder of the other Megatron. Its dependencies are those that are installed with
    ours."""
    return fetched("megatron-core", VERSION)


def run_under(megatron: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m`` with ``words`` in a process that imports the Megatron in the folder
    ``megatron``."""
    path = [str(megatron), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "MEGATRON_EXT_NIGHTLY": "1"},
        capture_output=True,
        text=True,
    )


def test_doctor_finds_that_every_patch_fits(other_megatron: Path) -> None:
    result = run_under(other_megatron, "megatron_ext", "doctor", "--json")
    report = json.loads(result.stdout)
    assert report["environment"]["megatron-core"] == f"{VERSION} ({other_megatron}/megatron/core)"
    assert {patch["state"] for patch in report["patches"]} == {"fits"}
    assert result.returncode == 0


@nightly("by day doctor reads all that is patched there")
def test_it_trains_to_its_own_numbers(other_megatron: Path) -> None:
    """Trainings under another supported version of Megatron equal stock of that version, and
    checkpoints go from one schedule to another."""
    result = run_under(other_megatron, "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(TESTS)} passed" in result.stdout, result.stdout
