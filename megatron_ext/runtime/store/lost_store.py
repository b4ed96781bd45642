"""Readable error of a rank whose store is gone.

torch's store lives in one process, and every call fails when that process has ended: with "Broken
pipe" or "Failed to recv, got 0 bytes", which name neither the cause nor the work in progress.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def losing_the_store(meanwhile: str) -> Iterator[None]:
    """Context in which the error of a lost store of torch's is replaced by a readable one.

    ``meanwhile`` is a clause that names the work in progress. Only calls of the store belong into
    the context.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"torch's key-value store is gone, and {meanwhile}: the rank that serves the store "
            "has ended or was killed (was there memory enough?), or the job ends"
        ) from error
