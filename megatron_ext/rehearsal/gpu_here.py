"""GPU of this machine, found without CUDA.

A process that has used CUDA cannot fork one that uses it too, so the name of the GPU and its free
memory come from nvidia-smi.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

_QUERY = ("--query-gpu=name,memory.free", "--format=csv,noheader,nounits")
_SECONDS = 20.0  # time limit in seconds for a driver that does not answer


@dataclass(frozen=True)
class GpuHere:
    """GPU of this machine, as the driver describes it.

    Attributes:
        name: name of the GPU.
        free: bytes of its memory that are free; None if the driver does not tell.
    """

    name: str
    free: float | None


def gpu_here() -> GpuHere | None:
    """Return the first GPU that a process on this machine would use; None if there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip(" ,"):
        return None
    which = [] if visible is None else [f"--id={visible.split(',')[0].strip()}"]
    try:
        ran = subprocess.run(
            ["nvidia-smi", *which, *_QUERY], capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        return None
    name, _, free = lines[0].rpartition(",")
    mebibytes = free.strip()
    return GpuHere(name.strip(), 2.0**20 * int(mebibytes) if mebibytes.isdecimal() else None)
