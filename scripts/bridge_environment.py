"""Folder with Megatron-Bridge next to the project's environment, for PYTHONPATH or sys.path.

    PYTHONPATH=$(python scripts/bridge_environment.py) python ...

Torch and Megatron stay those of the environment: only what scripts/bridge_requirements.txt lists is
installed, without dependencies, into build/bridge/DIGEST, once for each text of that list.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
REQUIREMENTS = REPOSITORY / "scripts" / "bridge_requirements.txt"


def prepare() -> tuple[Path, str]:
    """Return the folder, and why it could not be made; empty if it is there."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = REPOSITORY / "build" / "bridge" / digest
    if folder.exists():
        return folder, ""
    if sys.version_info[:2] != (3, 12):
        return folder, f"it needs Python 3.12, and this is {sys.version.split()[0]}"
    arriving = folder.with_name(f"{digest}.{os.getpid()}")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"),
            *("--no-deps", "--no-compile", "--retries", "1", "--timeout", "10"),
            *("--target", str(arriving), "--requirement", str(REQUIREMENTS)),
        ],
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        shutil.rmtree(arriving, ignore_errors=True)
        return folder, (ended.stderr.strip().splitlines() or ["no message"])[-1]
    try:
        arriving.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(arriving)  # another process was quicker
    return folder, ""


def main() -> None:
    folder, problem = prepare()
    if problem:
        sys.exit(f"Megatron-Bridge cannot be installed with pip: {problem}")
    print(folder)


if __name__ == "__main__":
    main()
