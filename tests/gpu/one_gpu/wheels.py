"""Packages that a machine without a network lacks, from wheels that were brought along."""

from __future__ import annotations

import importlib.metadata
import zipfile
from pathlib import Path


def unpack(wheels: Path, folder: Path) -> list[str]:
    """Unpack those of ``wheels`` whose package is not installed here into ``folder``.

    Returns their names. What is installed stays as it is, whatever its version.
    """
    brought = []
    for wheel in sorted(wheels.glob("*.whl")):
        name, version, *_ = wheel.name.split("-")
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            target = folder / f"{name}-{version}"
            if not target.exists():
                zipfile.ZipFile(wheel).extractall(target)
            brought.append(str(target))
    return brought
