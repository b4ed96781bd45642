"""Folder of the checkpoint that a launch command loads."""

from __future__ import annotations

from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


def name_of(iteration: str) -> str:
    """Return the name of the folder of ``iteration``, as Megatron writes it."""
    return iteration if iteration == "release" else f"iter_{int(iteration):07d}"


def iteration_to_load(folder: str, step: int | None) -> Path | None:
    """Return the folder of the checkpoint that ``--load`` takes from ``folder``, which is that of
    ``step`` if given; None if it does not exist."""
    tracker = Path(folder) / TRACKER
    if not tracker.is_file():
        return None
    iteration = str(step) if step is not None else tracker.read_text().strip()
    if iteration != "release" and not iteration.isdecimal():
        return None
    checkpoint = Path(folder) / name_of(iteration)
    return checkpoint if checkpoint.is_dir() else None
