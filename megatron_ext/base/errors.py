"""How a user's mistake ends a launch.

Every rank of a launch finds the same mistake at the same time, and a thousand copies of an error
are hard to read. So one rank prints the error for all ranks, or one rank a node if nodes may
differ, and all ranks exit with status 2.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from megatron_ext.base.words import shown

# Longest error text in characters. A longer error is a mistake of megatron_ext itself, such as a
# cycle of all actions.
LONGEST_ERROR = 10_000
# Seconds that the other ranks of a node wait for the first rank to print the same error.
FIRST_SECONDS = 3.0
RECENT_SECONDS = 60.0  # seconds within which all ranks of a launch make the same mistake


def without_torch(work: str, error: Exception) -> ValueError:
    """Return the error that torch cannot be imported.

    ``work`` names what cannot be done, such as "a training".
    """
    return ValueError(
        f"{work} needs torch, which cannot be imported here: {error}; run this where torch is "
        f"installed, such as in the container of the training"
    )


def exit_for(error: Exception) -> NoReturn:
    """Print ``error`` on one rank of a launch, and exit with status 2, as command lines do.

    Global rank 0 prints the error, and so does the first rank of every other node, as the mistake
    may be one node's alone (a missing file). The mistake may also be one rank's alone (a variable
    of its environment), so any other rank prints an error that no rank of its node has printed.
    """
    env, host = os.environ, socket.gethostname()
    rank = env.get("RANK", env.get("SLURM_PROCID", "0"))
    local_rank = env.get("LOCAL_RANK", env.get("SLURM_LOCALID"))
    text = shown(error, LONGEST_ERROR)
    note = _note_of(text)
    is_first = rank == "0" or local_rank == "0"
    if not is_first:
        end = time.monotonic() + FIRST_SECONDS
        while not _is_recent(note) and time.monotonic() < end:
            time.sleep(0.05)
    if _leave(note) or is_first:
        which = f" on {host}" if is_first else f" on {host}, global rank {rank}"
        which = "" if rank == "0" else which
        with contextlib.suppress(OSError):
            print(f"megatron_ext: error{which}: {text}", file=sys.stderr, flush=True)
    raise SystemExit(2) from error


def _note_of(text: str) -> Path:
    """Return the file that tells the ranks of this node and launch that ``text`` is printed."""
    env = os.environ
    launch = f"{os.getppid()}"  # process id of torchrun's agent, which all ranks of a node share
    if "SLURM_STEP_ID" in env and "TORCHELASTIC_RUN_ID" not in env:
        launch = f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    words = launch, env.get("TORCHELASTIC_RESTART_COUNT"), text
    digest = hashlib.sha256(repr(words).encode(errors="replace")).hexdigest()[:16]
    return Path(env.get("TMPDIR", "/tmp")) / f"megatron_ext-error-{os.getuid()}-{digest}"


def _is_recent(note: Path) -> bool:
    """Return whether a rank of this user has just printed an error and left the file ``note``."""
    try:
        found = note.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and abs(time.time() - found.st_mtime) < RECENT_SECONDS


def _leave(note: Path) -> bool:
    """Leave the file ``note``, by which ranks agree that one of them prints an error.

    Return whether this rank is to print the error, as no other has.
    """
    if _is_recent(note):
        return False
    with contextlib.suppress(OSError):
        note.unlink(missing_ok=True)
    try:
        os.close(os.open(note, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return not _is_recent(note)
    except OSError:  # without the file that notes the error, several ranks may print the same line
        pass
    return True
