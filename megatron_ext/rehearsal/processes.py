"""Processes of rehearsed ranks, one after another: they share one GPU.

A rank needs a process of its own, as Megatron's state is global, and importing it takes long. One
process imports everything and forks each rank. If a rank dies without a record, the error has the
last line of its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_ext.base.text_file import read_text_file
from megatron_ext.rehearsal.record import RankRecord, load_rank_record
from megatron_ext.rehearsal.request import FAILURE, RECORD, RankRequest, save_request
from megatron_ext.rehearsal.server import LOG

_SERVER = ("-m", "megatron_ext.rehearsal.server")
_LAST_SECONDS = 5.0  # seconds that a process has to end by itself before it is killed
_SHOWN = 2**12  # number of bytes at the end of a log that are shown


class RunsRanks(Protocol):
    """Function that runs the rank of a request to its end, and returns its record.

    Raises:
        ValueError: the rank has failed; the message has the reason and the file of its log.
    """

    def __call__(self, request: RankRequest) -> RankRecord: ...


class RankProcesses:
    """Runner of rehearsed ranks, each in a process forked from one that has imported everything.

    If the forking process has used CUDA, its forks could not use it, so each rank gets a process
    that is started for it.

    Attributes:
        used_cuda: how the forking process has used CUDA, in words; "" if it has not.
    """

    def __init__(self, server: subprocess.Popen[str], environment: Mapping[str, str]) -> None:
        self._server = server
        self._environment = environment
        self.used_cuda = str(self._answer()["used_cuda"])
        if self.used_cuda:
            _end(server)

    def __call__(self, request: RankRequest) -> RankRecord:
        path = save_request(request)
        for name in (RECORD, FAILURE):
            (request.folder / name).unlink(missing_ok=True)
        if self.used_cuda:
            status = _run_in_process(path, self._environment)
        else:
            assert self._server.stdin is not None
            self._server.stdin.write(f"{path}\n")
            self._server.stdin.flush()
            status = int(self._answer()["status"])
        return _record_of(request, status)

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            status = self._server.wait()
            raise ValueError(
                f"the process that forks rehearsed ranks has ended with status {status}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def rank_processes(environment: Mapping[str, str], log: Path) -> Iterator[RankProcesses]:
    """Start the process that forks ranks, and end it when the block of the ``with`` ends.

    Args:
        environment: variables of the process, in addition to those of this one.
        log: file for the output of the process, without that of the ranks.

    Raises:
        ValueError: the process cannot import the modules of a rank.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, **environment}
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, *_SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=variables,
        )
        try:
            yield RankProcesses(server, variables)
        except ValueError as error:
            if server.poll():  # the server process has ended with an error
                raise ValueError(f"{error}; {_last_line(log)} ({log})") from None
            raise
        finally:
            _end(server)


def _end(server: subprocess.Popen[str]) -> None:
    for pipe in (server.stdin, server.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    try:
        server.wait(_LAST_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _run_in_process(path: Path, environment: Mapping[str, str]) -> int:
    return subprocess.run(
        [sys.executable, *_SERVER, str(path)], env=environment, stdin=subprocess.DEVNULL
    ).returncode


def _record_of(request: RankRequest, status: int) -> RankRecord:
    folder = request.folder
    if status == 0 and (folder / RECORD).is_file():
        return load_rank_record(folder / RECORD)
    reason = f"ended with status {status} and no record"
    if (folder / FAILURE).is_file():
        reason = read_text_file(folder / FAILURE, "failure").strip()
    elif last := _last_line(folder / LOG):
        reason += f": {last}"
    raise ValueError(f"rank {request.rank}: {reason} (log: {folder / LOG})")


def _last_line(log: Path) -> str:
    """Return the last line of ``log`` that is not empty; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _SHOWN))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""
