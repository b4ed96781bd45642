"""What tests need beside the packages installed: others, each in a folder of its own, and files of
repositories."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

FETCHED = Path(__file__).parents[2] / "build"


def fetched(package: str, version: str, address: str = "") -> Path:
    """The folder with that version alone; skips the test if it cannot be had. ``address``: where
    pip finds it, of what is on no index."""
    folder, problem = _fetch(package, version, address)
    if problem:
        pytest.skip(f"{package} {version} cannot be fetched with pip: {problem}")
    return folder


@functools.cache  # without a network, one attempt is enough
def _fetch(package: str, version: str, address: str) -> tuple[Path, str]:
    folder = FETCHED / package / version
    if folder.exists():
        return folder, ""
    arriving = folder.with_name(f"{version}.{os.getpid()}")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"),
            *("--no-deps", "--retries", "1", "--timeout", "10", "--target", str(arriving)),
            address or f"{package}=={version}",
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


def fetched_file(repository: str, tag: str, path: str) -> Path:
    """A file of ``repository`` on GitHub as of ``tag``; skips the test if it cannot be had.

    A file that is in its place already is not fetched: ``build/OWNER/NAME/TAG/PATH``.
    """
    place = FETCHED / repository / tag / path
    problem = _fetch_file(f"https://raw.githubusercontent.com/{repository}/{tag}/{path}", place)
    if problem:
        pytest.skip(f"{place.relative_to(FETCHED.parent)} cannot be fetched: {problem}")
    return place


@functools.cache
def _fetch_file(address: str, place: Path) -> str:
    if place.exists():
        return ""
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            content = answer.read()
    except OSError as error:
        return str(error)
    place.parent.mkdir(parents=True, exist_ok=True)
    arriving = place.with_name(f"{place.name}.{os.getpid()}")
    arriving.write_bytes(content)
    arriving.replace(place)
    return ""
