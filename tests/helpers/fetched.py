"""Packages that tests need beside those installed, each in a folder of its own."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FETCHED = Path(__file__).parents[2] / "build"


def fetched(package: str, version: str) -> Path:
    """The folder with that version alone; skips the test if it cannot be had."""
    folder, problem = _fetch(package, version)
    if problem:
        pytest.skip(f"{package} {version} cannot be fetched with pip: {problem}")
    return folder


@functools.cache  # without a network, one attempt is enough
def _fetch(package: str, version: str) -> tuple[Path, str]:
    folder = FETCHED / package / version
    if folder.exists():
        return folder, ""
    arriving = folder.with_name(f"{version}.{os.getpid()}")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"),
            *("--no-deps", "--retries", "1", "--timeout", "10", "--target", str(arriving)),
            f"{package}=={version}",
        ],
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        return folder, (ended.stderr.strip().splitlines() or ["no message"])[-1]
    try:
        arriving.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(arriving)  # tests beside these were quicker
    return folder, ""
