"""Runs cases, each in a process of its own that may fail, end or hang without ending the others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from tests.gpu.one_gpu.rows import Row, State, names_error, parse

ROOT = Path(__file__).resolve().parents[3]
_POLL = 0.1  # seconds between two looks at a running case
_LAST_WORDS = 2.0  # seconds that a process has, after a signal, to print where it hangs
_LONGEST_REASON = 200
MISSING = "ModuleNotFoundError"
_ENDED_BY_US = "Fatal Python error: Aborted"  # line that Python prints at SIGABRT


@dataclass(frozen=True)
class Case:
    """A case. ``words`` follow ``python -m``. After ``seconds`` it is taken to hang. ``python`` is
    the oldest version that can run it."""

    name: str
    words: tuple[str, ...]
    seconds: float
    python: tuple[int, int] = (3, 9)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Cases that run in order and share a folder, in no more than ``seconds``."""

    cases: tuple[Case, ...]
    seconds: float


def run_part(part: Part, folder: Path) -> Iterator[Row]:
    """Yield the rows of ``part`` as they come. ``folder`` is empty, for logs and files that cases
    share."""
    end = time.monotonic() + part.seconds
    for case in part.cases:
        left = end - time.monotonic()
        if sys.version_info < case.python:
            reason = "needs Python " + ".".join(map(str, case.python))
            yield Row(case.name, reason, State.CANNOT_RUN)
            continue
        if left < 1:
            reason = f"the part's {part.seconds:.0f} s were over before its turn came"
            yield Row(case.name, reason, State.FAILED)
            continue
        yield from _run(case, min(left, case.seconds), folder)


def _run(case: Case, seconds: float, folder: Path) -> Iterator[Row]:
    """Yield at least one row; a case that ends badly says why in its last one."""
    path = folder / f"{case.name.replace(' ', '-').replace('/', '-')}.log"
    has_failed = has_told = False
    with path.open("w") as log, path.open(errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-u", "-m", *case.words],
            cwd=ROOT,
            env={
                **os.environ,
                **case.environment,
                "ONE_GPU_FOLDER": str(folder),
                "ONE_GPU_SECONDS": str(seconds),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # The process gets a session of its own, so that all ranks of the case can be ended
            # together.
            start_new_session=True,
        )
        try:
            end = time.monotonic() + seconds
            is_over = False
            while not is_over:
                is_over = process.poll() is not None or time.monotonic() > end
                for row in _rows(output):
                    has_told = True
                    has_failed = has_failed or row.state is State.FAILED
                    yield row
                time.sleep(0 if is_over else _POLL)
            hangs = process.poll() is None
        finally:
            _end(process)
    if hangs:
        words = f"did not end in {seconds:.0f} s; {last_words(path)}"
        yield Row(case.name, words, State.FAILED)
    elif process.returncode and not has_failed:
        words = last_words(path)
        if words.startswith(MISSING):
            yield Row(case.name, words, State.CANNOT_RUN)
        else:
            yield Row(case.name, f"ended with {process.returncode}; {words}", State.FAILED)
    elif not has_told:
        yield Row(case.name, "ended without a row", State.FAILED)


def _rows(output: TextIO) -> Iterator[Row]:
    """Yield the rows in the lines that are complete by now."""
    while True:
        begin = output.tell()
        line = output.readline()
        if not line.endswith("\n"):
            output.seek(begin)
            return
        row = parse(line.rstrip("\n"))
        if row is not None:
            yield row


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, and all processes that it started."""
    # At SIGABRT Python prints where it hangs; SIGKILL ends the process in any case.
    for signum in (signal.SIGABRT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        # A GPU driver may keep the process from ending.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS)


def last_words(log: Path) -> str:
    """Return the last line that names an error, or the last line, and the name of the log."""
    text = log.read_text(errors="replace").split(_ENDED_BY_US)[0]
    said = [line.strip() for line in text.splitlines() if line.strip() and parse(line) is None]
    last = (list(filter(names_error, said)) or said or ["it printed nothing"])[-1][:_LONGEST_REASON]
    return f"{last} (log: {log.name})"
