"""Folder with the packages of a caller of Megatron, apart from the project's environment.

    PYTHONPATH=$(python scripts/caller_packages.py bridge) python ...    # or verl

Torch and Megatron stay those of the environment: only what scripts/callers/NAME.txt lists is
installed, without dependencies, into build/NAME/DIGEST. DIGEST is that of the list's text, so a
changed list is installed anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CALLERS = {path.stem: path for path in sorted((REPOSITORY / "scripts" / "callers").glob("*.txt"))}


def prepare(caller: str) -> tuple[Path, str]:
    """Install the packages of ``caller``; return their folder, and why they could not be installed.

    The reason is "" if they are there.
    """
    requirements = CALLERS[caller]
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    folder = REPOSITORY / "build" / caller / digest
    if folder.exists():
        return folder, ""
    if sys.version_info[:2] != (3, 12):
        return folder, f"it needs Python 3.12, and this is {sys.version.split()[0]}"
    arriving = folder.with_name(f"{digest}.{os.getpid()}")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"),
            *("--no-deps", "--no-compile", "--retries", "1", "--timeout", "20"),
            *("--target", str(arriving), "--requirement", str(requirements)),
        ],
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        shutil.rmtree(arriving, ignore_errors=True)
        return folder, (ended.stderr.strip().splitlines() or ["no message"])[-1]
    # The wheel of verl contains these folders, which would replace those of the checkout.
    for name in ("tests", "scripts"):
        shutil.rmtree(arriving / name, ignore_errors=True)
    try:
        arriving.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(arriving)  # another process has installed the package meanwhile
    return folder, ""


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in CALLERS:
        sys.exit(f"usage: python scripts/caller_packages.py {'|'.join(CALLERS)}")
    folder, problem = prepare(sys.argv[1])
    if problem:
        sys.exit(f"{sys.argv[1]} cannot be installed with pip: {problem}")
    print(folder)


if __name__ == "__main__":
    main()
