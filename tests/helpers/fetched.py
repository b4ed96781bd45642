"""Packages that only tests need, each in its own folder, and Megatron-LM's sources."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FETCHED = Path(__file__).parents[2] / "build"
MEGATRON_LM = FETCHED / "NVIDIA/Megatron-LM/core_v0.19.0"
RETRIES = "2"  # number of retries of pip: a registry that answers late may still have the package


def megatron_sources() -> Path:
    """Return the folder of Megatron-LM's sources, with its scripts and tests: ``MEGATRON_LM_DIR``,
    else ``build/NVIDIA/Megatron-LM/core_v0.19.0``. Skip the test if the latter does not exist."""
    folder = Path(os.environ.get("MEGATRON_LM_DIR") or MEGATRON_LM)
    if (folder / "pretrain_gpt.py").is_file():
        return folder
    if "MEGATRON_LM_DIR" in os.environ:
        pytest.fail(f"MEGATRON_LM_DIR: {folder} has no pretrain_gpt.py")
    pytest.skip(
        "Megatron-LM's sources are neither in MEGATRON_LM_DIR nor in"
        f" {MEGATRON_LM.relative_to(FETCHED.parent)} (CONTRIBUTING.md says where to get them)"
    )


def fetched(package: str, version: str, address: str = "") -> Path:
    """Return the folder with only that version of ``package``, and skip the test if it cannot be
    fetched. ``address`` tells pip where to find a package that is on no index."""
    folder, problem = _fetch(package, version, address)
    if problem:
        pytest.skip(f"{package} {version} cannot be fetched with pip: {problem}")
    return folder


@functools.cache  # the result is cached: without a network, one attempt is enough
def _fetch(package: str, version: str, address: str) -> tuple[Path, str]:
    folder = FETCHED / package / version
    if folder.exists():
        return folder, ""
    arriving = folder.with_name(f"{version}.{os.getpid()}")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"),
            *("--no-deps", "--retries", RETRIES, "--timeout", "10", "--target", str(arriving)),
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
        shutil.rmtree(arriving)  # another test process has fetched the package meanwhile
    return folder, ""
