"""A full disk, simulated for this process."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Limit the size of a file to ``room`` bytes. Python ignores the signal SIGXFSZ, so a write
    beyond the limit raises OSError.

    No bytecode is written meanwhile: Python would truncate it without an error, and no later
    process could import the module.
    """
    usual, writes_none = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, usual[1]))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_none
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
