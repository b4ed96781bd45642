"""The logger of all that a training is told by us, ``megatron_ext``.

Its lines are written to stdout, whatever becomes of the root's level and handlers: Megatron sets
both. A notebook or a trainer silences them by the logger's level, and redirects them by
``handlers``, where ours is the first; handlers put there before this package is imported stay
alone.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from contextlib import AbstractContextManager

from megatron_ext.progress import reporting


class _Logger(logging.Logger):
    """Not silenced by `logging.disable`, which means others."""

    def isEnabledFor(self, level: int) -> bool:
        return not self.disabled and level >= self.getEffectiveLevel()


class _Standard(logging.Handler):
    """Writes ``megatron_ext: message`` to what sys.stdout is then, errors to sys.stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("megatron_ext: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, or lose it: a training does not end because a log cannot be written."""
        stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
        with contextlib.suppress(OSError, ValueError):  # a full disk or a broken pipe; closed
            print(self.format(record), file=stream, flush=True)


def _make() -> logging.Logger:
    """Return the logger, and set it up unless other code has done so."""
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
    """Within, a search or build that takes long says what it does, how far it is and when it ends
    at the latest, and again now and then. All ranks of the world do the same, and ``rank`` 0 tells.
    """
    return reporting(logger.info, logger.warning) if rank == 0 else contextlib.nullcontext()
