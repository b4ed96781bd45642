"""Commands run in forks of the test process that may take only limited memory and time."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.__main__ import main

MOST_BYTES, MOST_SECONDS = 2**30, 10  # limits of the child process: bytes, and CPU seconds


@dataclass(frozen=True)
class Ended:
    """End of a command: its exit status, everything that it printed, the seconds of its process,
    and the most bytes by which its process grew."""

    status: int
    output: str
    seconds: float
    grown: int


def run_limited(words: Sequence[str], folder: Path) -> Ended:
    """Run the command ``words`` in ``folder``, as `call_limited` does."""
    return call_limited(lambda: main(words), folder)


def call_limited(function: Callable[[], object], folder: Path) -> Ended:
    """Call ``function`` in a fork, in ``folder``. A signal ends it after twice `MOST_SECONDS`, and
    it gets no memory beyond twice `MOST_BYTES`."""
    with tempfile.TemporaryFile("w+") as log:
        start = time.monotonic()
        child = os.fork()
        if not child:
            _run(function, folder, log.fileno())
        _, status, usage = os.wait4(child, 0)
        log.seek(0)
        return Ended(
            os.waitstatus_to_exitcode(status),
            log.read(),
            min(time.monotonic() - start, usage.ru_utime + usage.ru_stime),
            usage.ru_maxrss * 1024 - _resident(),
        )


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _run(function: Callable[[], object], folder: Path, log: int) -> None:
    status = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (2 * MOST_SECONDS, 2 * MOST_SECONDS + 1))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2 * MOST_BYTES,) * 2)
        with (
            open(1, "w", closefd=False) as out,
            open(2, "w", closefd=False) as err,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            function()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)
