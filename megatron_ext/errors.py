"""How a user's mistake ends a launch."""

from __future__ import annotations

import os
import socket
import sys
from typing import NoReturn

from megatron_ext.words import shown

LONGEST_ERROR = 10_000  # characters; more is a mistake in itself, such as a cycle of all actions


def exit_for(error: Exception) -> NoReturn:
    """Exit with status 2, like a command line's parser. Global rank 0 says why for all, and of each
    other node its first rank, as the mistake may be that node's alone (a file it does not have)."""
    rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK")
    text = shown(error, LONGEST_ERROR)
    if rank == "0":
        sys.stderr.write(f"megatron_ext: error: {text}\n")
    elif local_rank == "0":
        sys.stderr.write(f"megatron_ext: error on {socket.gethostname()}: {text}\n")
    raise SystemExit(2)
