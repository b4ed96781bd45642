"""Folder of the checkpoint that a launch command loads.

Megatron chooses the folder from several flags and from a file with the latest iteration. A command
that judges a checkpoint before the launch has to find the same folder, and names the flag that it
came from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

TRACKER = "latest_checkpointed_iteration.txt"
_MOST_BYTES = 50  # largest size in bytes of the file that names the latest iteration


def folder_name(iteration: str) -> str:
    """Return the name of the folder that Megatron writes for a checkpoint of ``iteration``."""
    return iteration if iteration == "release" else f"iter_{int(iteration):07d}"


def iteration_in(tracker: Path) -> str:
    """Return the iteration in the file ``tracker``, which Megatron writes next to its checkpoints.

    At most 50 bytes are read, in case the file has other contents.
    """
    with tracker.open("rb") as file:
        return file.read(_MOST_BYTES).decode(errors="replace").strip()


def is_iteration(text: str) -> bool:
    """Return whether ``text`` names an iteration of a checkpoint: a number, or "release"."""
    return text == "release" or (text.isascii() and text.isdecimal())


def loading_flag(args: Any) -> str | None:
    """Return the flag of the checkpoint that a training loads; None if it loads none.

    The flag is ``--pretrained-checkpoint`` if that is given and ``--load`` has nothing to resume.
    """
    resumes = args.load is not None and (Path(args.load) / TRACKER).exists()
    if args.pretrained_checkpoint is not None and not resumes:
        return "--pretrained-checkpoint"
    return None if args.load is None else "--load"


def iteration_to_load(folder: str, step: int | None) -> Path | None:
    """Return the folder of the iteration that ``--load`` takes from ``folder``.

    Return None if there is none. ``step`` is the value of ``--ckpt-step``; None takes the latest
    iteration.
    """
    tracker = Path(folder) / TRACKER
    if not tracker.is_file():
        return None
    iteration = str(step) if step is not None else iteration_in(tracker)
    if not is_iteration(iteration):
        return None
    checkpoint = Path(folder) / folder_name(iteration)
    return checkpoint if checkpoint.is_dir() else None
