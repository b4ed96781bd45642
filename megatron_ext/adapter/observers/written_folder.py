"""Folder that an observer of steps writes to."""

from __future__ import annotations

from pathlib import Path


def make_folder(folder: Path, name: str) -> None:
    """Create ``folder`` unless it exists.

    Raises ValueError, with ``name`` for the folder, if that fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name} cannot be made: {error}") from None
