"""Folder that an observer of steps writes to."""

from __future__ import annotations

from pathlib import Path


def make_folder(folder: Path, name: str) -> None:
    """Make ``folder`` if it is not there. Raise ValueError, which calls it ``name``, if that
    fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name} cannot be made: {error}") from None
