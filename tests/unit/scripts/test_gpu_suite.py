"""On a runner for GPU tests nothing is skipped silently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[2] / "gpu" / "conftest.py"
TESTS = {
    "test_one.py": (
        "import pytest\n"
        "@pytest.mark.skipif(True, reason='needs two GPUs')\n"
        "def test_marked(): ...\n"
        "def test_within(): pytest.skip('this GPU has no FP8')\n"
        "def test_good(): ...\n"
    ),
    "test_other.py": "import pytest\npytest.importorskip('no_such_package')\n",
}


@pytest.mark.parametrize("words", [[], ["--no-skips"]])
def test_a_skip_is_a_failure_with_its_reason(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-rfEs", "--continue-on-collection-errors", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    for reason in ("needs two GPUs", "this GPU has no FP8", "no_such_package"):
        assert reason in ended.stdout, ended.stdout
    assert ended.returncode == bool(words)
    summary = "1 failed, 1 passed, 2 errors" if words else "1 passed, 3 skipped"
    assert summary in ended.stdout, ended.stdout
