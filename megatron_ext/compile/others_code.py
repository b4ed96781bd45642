"""Guard around the code of a user's schedule file, which may fail, exit, or never end.

Such a file is code of somebody else that runs within ours. Its exceptions become one error that
names the file and the line, except a refusal that it raises on purpose; and code that does not end
is stopped.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from megatron_ext.base.progress import duration, task
from megatron_ext.base.words import shown

_OURS = Path(__file__).parents[1]
LONGEST = 600.0  # longest time in seconds for a user's code that does not declare itself a search


@contextlib.contextmanager
def code_of(
    path: Path, what: str, failed: str, *, is_search: bool = False, may_refuse: bool = True
) -> Iterator[None]:
    """Run code of a user's schedule file ``path`` in the block, as a progress task called ``what``.

    The block is interrupted after `LONGEST` seconds unless it ``is_search``. This works in the main
    thread of a process only; another thread cannot be interrupted.

    Raises:
        ValueError: whatever the code raises, SystemExit included, with the text ``failed`` and the
            reason. A ValueError by which code that ``may_refuse`` its input refuses it is passed on
            unchanged.
    """
    try:
        with task(what), _time_limit(None if is_search else LONGEST):
            yield
    except KeyboardInterrupt:
        raise
    except _TimeIsUp:
        raise ValueError(
            f"schedule file {path}: {what} takes more than {duration(LONGEST)}: it may be in a "
            f"loop without an end; if it is a search, write @family(..., searches=True)"
        ) from None
    except BaseException as error:
        if may_refuse and isinstance(error, ValueError) and _is_refusal(error, path):
            raise
        text = shown(error, 300).strip()
        raise ValueError(
            f"schedule file {path}{_line_of(error, path)}{failed}: {type(error).__name__}"
            + (f": {text}" if text else "")
        ) from error


def _is_refusal(error: ValueError, path: Path) -> bool:
    """Return whether a user's schedule file raised ``error`` on purpose, to refuse a problem.

    This is so for a ``raise`` with a text in the file at ``path``, or in a function of this package
    that the file calls. A failing ``int("x")`` is a mistake.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    if not str(error).strip():
        return False
    if last.filename == str(path):
        return "raise " in (last.line or "")
    return Path(last.filename).is_relative_to(_OURS)


def _line_of(error: BaseException, path: Path) -> str:
    """Return text such as ``, line 7``: the line of a user's file at which ``error`` was raised.

    The text is empty if the error was raised elsewhere.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


# This exception derives from BaseException, since the interrupted code may catch every Exception.
class _TimeIsUp(BaseException):
    pass


@contextlib.contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Interrupt the block after ``seconds`` by `_TimeIsUp`, repeated each second until it ends."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise _TimeIsUp

    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # a timer that ran before is started anew with its remaining time
            left = max(left - (time.monotonic() - start), 0.001)
            signal.setitimer(signal.ITIMER_REAL, left, interval)
