"""The error of a rank whose store is gone, in words.

torch's store lives in one process, and every call of it fails when that process has ended: with
"Broken pipe" or "Failed to recv, got 0 bytes", which name neither the cause nor the work that was
under way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def losing_the_store(meanwhile: str) -> Iterator[None]:
    """Turn the error of torch's store, if it is lost within, into one that people understand.

    ``meanwhile`` is a clause that says who did what then. Only calls of the store belong inside.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"torch's store is gone, and {meanwhile}: the rank that keeps it has ended or was "
            f"killed (was there memory enough?), or the job ends"
        ) from error
