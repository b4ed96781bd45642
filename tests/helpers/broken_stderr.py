"""Ways in which writing to the stderr of a process fails, while the test's own ``sys.stderr`` still
works."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable


def closed() -> None:
    """Close stderr: the file descriptor 2 is no open file any more."""
    _keep_for_the_test()
    os.close(2)


def on_a_full_disk() -> None:
    """Let writes to stderr fail for lack of space."""
    _keep_for_the_test()
    _replace(os.open("/dev/full", os.O_WRONLY))


def of_a_reader_that_has_gone() -> None:
    """Let writes to stderr fail, as the pipe is broken."""
    _keep_for_the_test()
    reader, writer = os.pipe()
    os.close(reader)
    _replace(writer)


def of_a_reader_that_does_not_read() -> None:
    """Let writes to stderr block, as the pipe is full."""
    _keep_for_the_test()
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")
    os.set_blocking(writer, True)
    _replace(writer)


WAYS: list[Callable[[], None]] = [
    closed,
    on_a_full_disk,
    of_a_reader_that_has_gone,
    of_a_reader_that_does_not_read,
]


def _keep_for_the_test() -> None:
    """Keep the test's own ``sys.stderr`` writable."""
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)


def _replace(descriptor: int) -> None:
    os.dup2(descriptor, 2)
    os.close(descriptor)
