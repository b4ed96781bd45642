"""The logger ``megatron_ext``, which writes all our lines in a training.

Lines go to stdout, whatever the root logger's level and handlers, which Megatron sets. A notebook
or a trainer silences them by this logger's level, and redirects them by its ``handlers``, of which
ours is the first. If handlers exist before this package is imported, ours is not added.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from contextlib import AbstractContextManager

from megatron_ext.base.progress import reporting


class _Logger(logging.Logger):
    """Logger of this package, which `logging.disable` does not silence as it does others."""

    def isEnabledFor(self, level: int) -> bool:
        return not self.disabled and level >= self.getEffectiveLevel()


class _Standard(logging.Handler):
    """Handler that writes ``megatron_ext: message`` to the current sys.stdout, and errors to
    sys.stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("megatron_ext: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line of the log, or drop it: a training does not end because of its log."""
        stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
        # The log line is lost if the disk is full, the pipe is broken, or the stream is closed.
        with contextlib.suppress(OSError, ValueError):
            print(self.format(record), file=stream, flush=True)


def _make() -> logging.Logger:
    """Return this package's logger, and set it up unless other code has done so."""
    others = logging.getLoggerClass()
    logging.setLoggerClass(_Logger)
    try:
        made = logging.getLogger("megatron_ext")
    finally:
        logging.setLoggerClass(others)
    if made.level == logging.NOTSET:
        made.setLevel(logging.INFO)
    if not made.handlers:
        made.propagate = False
        made.addHandler(_Standard())
    return made


logger = _make()


def telling_of_long_work(rank: int) -> AbstractContextManager[None]:
    """Let a long search or build in the block log its progress repeatedly, on ``rank`` 0 only.

    All ranks of the world do the same work.
    """
    return reporting(logger.info, logger.warning) if rank == 0 else contextlib.nullcontext()
