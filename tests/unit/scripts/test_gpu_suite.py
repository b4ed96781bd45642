"""Tests that nothing is skipped silently on a runner for GPU tests, or at night."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CONFTEST = """
from tests.helpers.skips import *
from tests.helpers.skips import add_option as pytest_addoption
"""
TESTS = {
    "test_one.py": (
        "import pytest\n"
        "@pytest.mark.skipif(True, reason='needs two GPUs')\n"
        "def test_marked(): ...\n"
        "def test_within(): pytest.skip('this GPU has no FP8')\n"
        "def test_good(): ...\n"
    ),
    "test_runner.py": (
        "import pytest\n"
        "@pytest.mark.skipif(True, reason='needs root: SLURM starts jobs as root')\n"
        "def test_cluster(): ...\n"
    ),
    "test_other.py": "import pytest\npytest.importorskip('no_such_package')\n",
}


NIGHT = "MEGATRON_EXT_NIGHTLY"


@pytest.mark.parametrize(
    ("words", "night", "summary"),
    [
        ([], "0", "1 passed, 4 skipped"),
        (["--no-skips"], "0", "1 failed, 1 passed, 3 errors"),
        ([], "1", "1 failed, 1 passed, 2 skipped, 1 error"),
    ],
)
def test_a_skip_is_a_failure_with_its_reason(
    words: list[str], night: str, summary: str, tmp_path: Path
) -> None:
    """A skip in the GPU suite is a failure, with its reason. The nightly runs used to pass,
    although fifteen trainings could not fetch their package."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-rfEs", "--continue-on-collection-errors", *words],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(ROOT),
            NIGHT: night,
        },
        capture_output=True,
        text=True,
    )
    for reason in ("needs two GPUs", "this GPU has no FP8", "no_such_package", "needs root"):
        assert reason in ended.stdout, ended.stdout
    assert ended.returncode == ("failed" in summary)
    assert summary in ended.stdout, ended.stdout
