"""Packages that a machine without a network lacks, from wheels that were copied to it."""

from __future__ import annotations

import importlib.metadata
import zipfile
from pathlib import Path


def unpack(wheels: Path, folder: Path) -> list[str]:
    """Unpack into ``folder`` each of ``wheels`` whose package is not installed.

    The function returns their folders. Installed packages stay as they are, whatever their version.
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
