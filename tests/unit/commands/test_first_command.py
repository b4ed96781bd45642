"""Tests of first commands of a new user: the version, and any command under a Python that is too
old."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import megatron_ext
from megatron_ext.cli import app

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "megatron_ext" / "__init__.py"
PYENV = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
OLDER = [
    python
    for python in sorted(PYENV.glob("3.*/bin/python"))
    if 6 <= int(python.parts[-3].split(".")[1]) < 12
]


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"megatron_ext {megatron_ext.__version__}\n"
    assert "--version" in CliRunner().invoke(app, ["--help"]).output


def test_an_older_python_can_read_as_far_as_the_message() -> None:
    """An older Python can run the package far enough to print which version is required. Under
    Python 3.11 a checkout used to end in an AttributeError about enum, and under 3.6 in a
    SyntaxError."""
    ast.parse(PACKAGE.read_text(), feature_version=(3, 7))
    assert "from __future__" not in PACKAGE.read_text()  # Python 3.6 has no future annotations


def test_an_older_python_is_named_where_the_package_is_imported() -> None:
    disguise = "import sys; sys.version_info = (3, 11, 7); sys.version = '3.11.7 (main)'"
    ended = subprocess.run(
        [sys.executable, "-c", f"{disguise}; import megatron_ext.auto"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    line = f"ImportError: megatron_ext needs Python 3.12 or later; {sys.executable} is 3.11.7"
    assert ended.stderr.splitlines()[-1] == line


@pytest.mark.skipif(not OLDER, reason="pyenv has no older Python here")
@pytest.mark.parametrize("python", OLDER, ids=lambda python: python.parts[-3])
def test_python_m_with_an_older_python_prints_one_line(python: Path) -> None:
    ended = subprocess.run(
        [python, "-B", "-m", "megatron_ext", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert re.search(r"megatron_ext needs Python 3\.12 or later; \S+ is 3\.\d+\.\d+", line)
