"""Test that `coverage run -m pytest` counts lines that run on forked ranks and in programs that
tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from tests.helpers.forked import run_forked
from work import on_rank, on_rank_of_script, on_terminated_rank

if sys.argv[1:]:
    sys.exit(run_forked(on_rank_of_script, Path("log")))
assert run_forked(on_rank, Path("log")) == 0
assert subprocess.run([sys.executable, "script.py", "as a script"]).returncode == 0
pid = os.fork()
if not pid:
    on_terminated_rank()
while not Path("ready").exists():
    time.sleep(0.01)
os.kill(pid, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
"""
WORK = """
from pathlib import Path
from time import sleep
def on_rank():
    print("here")
def on_rank_of_script():
    print("here")
def on_terminated_rank():
    Path("ready").touch()
    sleep(100)
def on_no_rank():
    print("nowhere")
"""


def test_lines_that_only_ranks_run_are_counted(tmp_path: Path) -> None:
    """Coverage counts lines that only forked ranks run, although these ranks end by os._exit or are
    terminated."""
    coverage = pytest.importorskip("coverage", reason="needs the package coverage (.[dev])")
    for name, text in (("script.py", SCRIPT), ("work.py", WORK)):
        (tmp_path / name).write_text(text.lstrip())
    # The settings of a coverage run around this test are removed.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    settings = ["--rcfile", str(ROOT / "pyproject.toml")]
    for words in (
        ["run", "--source", str(tmp_path), *settings, "script.py"],
        ["combine", *settings],
    ):
        subprocess.run(
            [sys.executable, "-m", "coverage", *words],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT)},
            check=True,
            timeout=60,
        )
    data = coverage.CoverageData(str(tmp_path / "build" / "coverage" / "data"))
    data.read()
    lines = (
        WORK.lstrip().splitlines()[number - 1].strip()
        for number in data.lines(str(tmp_path / "work.py"))
    )
    ran = [line for line in lines if not line.startswith(("from", "def"))]
    assert ran == ['print("here")', 'print("here")', 'Path("ready").touch()', "sleep(100)"]
