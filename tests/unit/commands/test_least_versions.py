"""Tests of the commands with the oldest versions of required packages that setup.py allows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.combinations import nightly
from tests.helpers.fetched import fetched

ROOT = Path(__file__).parents[3]
# Name of a test that needs OR-tools, which requires numpy 2.
NEEDS_NUMPY_2 = "test_simulate_says_what_a_certificate_is_worth"


def least_versions() -> dict[str, str]:
    """Return the oldest allowed version of each package that an installation requires."""
    (required,) = re.findall(r"install_requires=\[(.*)\]", (ROOT / "setup.py").read_text())
    return dict(re.findall(r'"(\w+)>=([\d.]+)"', required))


def test_each_requirement_has_a_lower_bound() -> None:
    assert least_versions().keys() == {"numpy", "rich", "typer"}


@nightly("by day the tests of commands run with the newest versions")
def test_commands_work_with_the_least_versions() -> None:
    """The commands work with the oldest allowed versions of packages. With typer 0.9, which
    setup.py used to allow, every command ended in a traceback."""
    folders = [str(fetched(name, version)) for name, version in least_versions().items()]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "tests/unit/commands"),
            *("--ignore", str(Path(__file__).relative_to(ROOT))),
            *("-k", f"not {NEEDS_NUMPY_2} and not --seconds"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "MEGATRON_EXT_NIGHTLY": "0"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
