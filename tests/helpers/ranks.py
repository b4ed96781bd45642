"""Run a function on several ranks, forked from one process, with gloo between them.

Forking costs tenths of a second where a launch costs ten: the parent has imported torch, and
whatever its test module imports, once. It must not have started a process group or a thread pool.

Ranks are forked from the test process itself, or from a `Script`: those end as a training script
does, by an uncaught exception and the interpreter's own shutdown. By day only rank 0 of
a test's first case takes its modules apart at the end: that copies all of its parent's memory, and
costs more than a second.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from tests.helpers.combinations import IS_NIGHT

ROOT = Path(__file__).resolve().parents[2]

# Seconds after which a rank is taken to hang. Far more than any needs on a busy machine, and less
# than the ten minutes or more after which torch gives up waiting and ends it.
HANGS = 240.0


@dataclass(frozen=True)
class RankResult:
    """How a rank ended: ``value`` of a good one, ``error`` (a traceback) of another.

    Ranks of a `Script` have neither: their traceback is in ``stderr``.
    """

    exit_code: int | None  # negative: the signal that ended it; None: it had to be killed
    seconds: float
    value: Any = None
    error: str = ""
    stderr: str = ""


@dataclass(frozen=True)
class Request:
    """Request for one forked rank, which leads a process group of its own."""

    rank: int
    ranks: int
    function: Callable[[int], Any]
    folder: str
    connect: bool
    takes_modules_apart: bool = False  # at its end, if it is a `Script`'s

    def run(self) -> Any:
        """In the rank: to the function's end."""
        os.setpgid(0, 0)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        tempfile.tempdir = self.folder  # who ends at once leaves behind what its exit would remove
        file = os.open(f"{self.folder}/{self.rank}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 2)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  # for its whole life
        share_gloo_device()
        if self.connect:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self.folder}/store",
                rank=self.rank,
                world_size=self.ranks,
            )
            dist.barrier()  # else one that ends at once is gone before others have connected
        return _call_in_one_chunk(self.function, self.rank)


def _call_in_one_chunk(function: Callable[[int], Any], rank: int) -> Any:
    return function(rank)


# Python keeps its frames in chunks of 16 KiB, and maps and unmaps one wherever calls cross its end:
# in a training thousands of times, which took a twentieth of a rank's CPU time. A function that
# claims 40,000 words of stack gets a chunk of 512 KiB, and all that it calls lies in the same.
_call_in_one_chunk.__code__ = _call_in_one_chunk.__code__.replace(co_stacksize=40_000)


def share_gloo_device() -> None:
    """Let one thread of this process poll the sockets of all its groups.

    torch starts one for each group, and it wakes a hundred times a second even if nothing comes. A
    rank of Megatron has 24 to 88 groups, whose threads took a tenth of its CPU time.
    """
    device = dist.ProcessGroupGloo.create_device(interface="lo")
    # For as long as the process: who frees a device waits for its thread, some of them for ever.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))

    def create(asked: Any, _: object) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [device], asked.timeout
        group = dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, options)
        group.options.global_ranks_in_group = asked.global_ranks_in_group
        group.options.group_name = asked.group_id
        return group

    gloo = dist.Backend.GLOO
    devices, kind = dist.Backend.backend_capability[gloo], dist.Backend.backend_type_map[gloo]
    dist.Backend.register_backend(gloo, create, True, devices, _backend_type=kind)


class Parent(Protocol):
    """A process that ranks are forked from."""

    def fork(self, request: Request) -> int:
        """Start a rank; its process id."""
        ...

    def exit_code(self, pid: int) -> int | None:
        """Return the rank's exit code, None while it runs. May not be called again once it has
        ended."""
        ...


class ThisProcess:
    """Ranks are forked right here. They leave without the interpreter's shutdown, which would
    clean up after the tests' process too."""

    def fork(self, request: Request) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        result: dict[str, Any] = {}
        try:
            result["value"] = request.run()
        except BaseException:
            result["error"] = traceback.format_exc()
        with open(f"{request.folder}/{request.rank}", "wb") as file:
            pickle.dump(result, file)
        for worker in multiprocessing.active_children():
            worker.kill()  # a checkpoint's writers, which the interpreter's shutdown would end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if "error" in result else 0)

    def exit_code(self, pid: int) -> int | None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None


class Script:
    """Ranks are forked from the top level of this file, run as a script."""

    def __init__(self) -> None:
        self._tests: set[str] = set()  # those that have had ranks
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-X", "faulthandler"),
                    *("-m", "tests.helpers.ranks", str(theirs.fileno())),
                ],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def fork(self, request: Request) -> int:
        """The request's function must be one that another process can import by its name."""
        test = re.split(r"[\[ ]", os.environ.get("PYTEST_CURRENT_TEST", ""))[0]  # not its case
        is_first = request.rank == 0 and test not in self._tests
        self._tests.add(test)
        self._connection.send(replace(request, takes_modules_apart=is_first or IS_NIGHT))
        return self._connection.recv()

    def exit_code(self, pid: int) -> int | None:
        self._connection.send(pid)
        return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


class RunningRanks:
    """Ranks under way, to be watched, sent signals and waited for."""

    def __init__(self, pids: list[int], parent: Parent, folder: str) -> None:
        self._pids = pids
        self._parent = parent
        self._folder = folder
        self._start = time.monotonic()
        self._ended: dict[int, tuple[int | None, float]] = {}

    def send_signal(self, rank: int, signum: int) -> None:
        os.kill(self._pids[rank], signum)

    def stderr(self, rank: int) -> str:
        """Return what the rank has written so far."""
        with contextlib.suppress(FileNotFoundError):
            return Path(f"{self._folder}/{rank}.stderr").read_text()
        return ""

    def wait_until_it_says(self, rank: int, text: str) -> None:
        """Return when ``text`` is in the rank's stderr."""
        end = time.monotonic() + HANGS
        while text not in self.stderr(rank):
            assert time.monotonic() < end, f"rank {rank} never said {text!r}: {self.stderr(rank)}"
            assert rank in self._alive(), f"rank {rank} has ended: {self.stderr(rank)}"
            time.sleep(0.02)

    def wait_until_ended(self, *ranks: int) -> None:
        end = time.monotonic() + HANGS
        while left := set(ranks) & set(self._alive()):
            assert time.monotonic() < end, f"still running: ranks {left}"
            time.sleep(0.01)

    def wait(self, timeout: float = HANGS) -> list[RankResult]:
        """How they ended, in rank order. Who is alive after ``timeout`` seconds is killed."""
        end = time.monotonic() + timeout
        while self._alive() and time.monotonic() < end:
            time.sleep(0.01)
        self.kill()
        return [self._result(rank) for rank in range(len(self._pids))]

    def kill(self) -> None:
        """End those that still run, and what processes of theirs any rank has left behind."""
        killed = self._alive()
        for rank in killed:
            os.kill(self._pids[rank], signal.SIGKILL)
        while self._alive():
            time.sleep(0.01)
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # the writers of a checkpoint, say
        for rank in killed:
            self._ended[rank] = (None, self._ended[rank][1])

    def _alive(self) -> list[int]:
        for rank, pid in enumerate(self._pids):
            if rank not in self._ended:
                exit_code = self._parent.exit_code(pid)
                if exit_code is not None:
                    self._ended[rank] = exit_code, time.monotonic() - self._start
        return [rank for rank in range(len(self._pids)) if rank not in self._ended]

    def _result(self, rank: int) -> RankResult:
        left = {}
        # A rank that was killed, or one of a Script, has left nothing or half of it.
        with contextlib.suppress(OSError, EOFError), open(f"{self._folder}/{rank}", "rb") as file:
            left = pickle.load(file)
        return RankResult(*self._ended[rank], **left, stderr=self.stderr(rank))


@contextlib.contextmanager
def running_ranks(
    ranks: int,
    function: Callable[[int], Any],
    parent: Parent | None = None,
    connect: bool = True,
) -> Iterator[RunningRanks]:
    """``function(rank)`` on each of ``ranks`` processes, forked from ``parent`` (this process).

    None of them outlives the block.
    """
    parent = parent or ThisProcess()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pids = [
            parent.fork(Request(rank, ranks, function, folder, connect)) for rank in range(ranks)
        ]
        running = RunningRanks(pids, parent, folder)
        try:
            yield running
        finally:
            running.kill()


def run_ranks(
    ranks: int, function: Callable[[int], Any], timeout: float = HANGS, connect: bool = True
) -> list[RankResult]:
    """``function(rank)`` on each of ``ranks`` forked processes; results in rank order.

    A rank still alive after ``timeout`` seconds is killed; its exit code is None.
    """
    with running_ranks(ranks, function, connect=connect) as running:
        return running.wait(timeout)


def values(results: list[RankResult]) -> list[Any]:
    """The values of ranks that must all have ended well. Of those that have not, the first to end
    is told of: others may have failed since it was gone."""
    by_end = sorted(enumerate(results), key=lambda item: item[1].seconds)
    for rank, result in by_end:
        assert result.exit_code == 0, (
            f"rank {rank} ended with {result.exit_code} after {result.seconds:.1f} s\n"
            f"{result.error}{result.stderr}"
        )
    return [result.value for result in results]


def use_huge_pages() -> None:
    """Have the kernel move what is in memory to pages of 2 MiB: forking a rank, and its end, then
    take a third of the time. Where the kernel cannot, nothing changes."""
    size = 2 << 20
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    starts: list[int] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, device, _, *name = line.split()
        first, end = (int(address, 16) // size * size for address in addresses.split("-"))
        if access == "rw-p" and device == "00:00" and name in ([], ["[heap]"]):
            starts += range(first + size, end, size)
    assert starts, "no memory was found in /proc/self/maps"
    for start in starts:
        libc.madvise(start, size, _MADV_COLLAPSE)


_MADV_COLLAPSE = 25  # of Linux 6.1


def lasting_folder() -> Path:
    """A new folder, for what several tests share: gone when the tests' process ends."""
    _FOLDERS.append(tempfile.TemporaryDirectory())
    return Path(_FOLDERS[-1].name)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@contextlib.contextmanager
def agent_store() -> Iterator[int]:
    """The port of a new store for ranks to meet at, as torchrun's agent keeps one.

    It listens before a rank is forked, at a port that the system gives to no other process. A
    port that is only found to be free may be another's when rank 0 comes to listen there.
    """
    stores = _process_of_stores()
    stores.send(None)
    port = stores.recv()
    try:
        yield port
    finally:
        stores.send(port)


@functools.cache
def _process_of_stores() -> multiprocessing.connection.Connection:
    """Stores are in a process of their own: threads of the tests' process would be missing in
    forked ranks."""
    ours, theirs = multiprocessing.Pipe()
    if os.fork():
        theirs.close()
        return ours
    try:
        # Whatever else the tests' process holds, such as its end of a `Script`'s pipe, must be
        # closed when it closes it: who reads at the other end would wait for ever.
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        gc.freeze()  # no object of the tests' process closes a number that a store has by now
        stores = {}
        while True:
            port = theirs.recv()
            if port is None:
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                stores[store.port] = store
                theirs.send(store.port)
            else:
                del stores[port]
    finally:  # the tests' process has ended, or Ctrl-C has: never return into its tests
        os._exit(0)


def torchrun_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables in which torchrun tells a rank who it is, on one node, and that its agent has
    the store at ``port`` (`agent_store`)."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _next_request(connection: multiprocessing.connection.Connection) -> Request:
    """Serve a `Script`; returns in each rank that it forks."""
    imported = 0
    while True:
        try:
            message = connection.recv()
        except EOFError:
            sys.exit()
        if isinstance(message, int):
            connection.send(ThisProcess().exit_code(message))
            continue
        if imported < len(sys.modules):  # for this request
            imported = len(sys.modules)
            gc.freeze()  # else a rank's shutdown, which collects garbage, copies all of this first
            use_huge_pages()
        pid = os.fork()
        if pid == 0:
            connection.close()
            return message
        connection.send(pid)


def _run_and_leave(request: Request) -> NoReturn:
    """Run it, and end as the interpreter does, but for what it does to modules last of all."""
    status: Any = 0
    try:
        request.run()
    except SystemExit as end:
        status = 0 if end.code is None else end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


if __name__ == "__main__":
    _request = _next_request(multiprocessing.connection.Connection(int(sys.argv[1])))
    if _request.takes_modules_apart:
        _request.run()
    else:
        _run_and_leave(_request)
