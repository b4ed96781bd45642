"""Run a function on several ranks that are forked from one process, with gloo between them.

Forking costs tenths of a second and a launch ten seconds, as the parent has imported torch and the
imports of its test module once. The parent must not have started a process group or a thread pool.

Ranks are forked from the test process itself, or from a `Script`. The latter end as a training
script does, through an uncaught exception or the interpreter's own shutdown. By day only rank 0 of
a test's first case destroys its modules at the end: this copies all of its parent's memory, and
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

# Seconds after which a rank is taken to hang. No rank needs nearly as long, even on a busy machine,
# and torch ends a waiting rank only after ten minutes or more.
HANGS = 240.0


@dataclass(frozen=True)
class RankResult:
    """How a rank ended: ``value`` if it ended well, otherwise ``error`` (a traceback).

    Ranks of a `Script` have neither; their traceback is in ``stderr``.
    """

    # negative number of the signal that ended the rank; None if the test had to kill it
    exit_code: int | None
    seconds: float
    value: Any = None
    error: str = ""
    stderr: str = ""


@dataclass(frozen=True)
class Request:
    """Request for one forked rank, which leads its own process group."""

    rank: int
    ranks: int
    function: Callable[[int], Any]
    folder: str
    connect: bool
    # whether a `Script`'s rank ends with Python's full shutdown, which takes modules apart
    takes_modules_apart: bool = False

    def run(self) -> Any:
        """Run the function to its end, in the rank."""
        os.setpgid(0, 0)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        # Temporary files go into the test's folder, as a rank that ends at once does not remove
        # them.
        tempfile.tempdir = self.folder
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
            # Without this barrier a rank that ends at once might be gone before others have
            # connected.
            dist.barrier()
        return _call_in_one_chunk(self.function, self.rank)


def _call_in_one_chunk(function: Callable[[int], Any], rank: int) -> Any:
    return function(rank)


# Python stores frames in chunks of 16 KiB, and maps and unmaps a chunk whenever calls cross its
# end: in a training thousands of times, which took a twentieth of a rank's CPU time. A function
# that claims 40,000 words of stack gets a chunk of 512 KiB, and all functions that it calls use the
# same chunk.
_call_in_one_chunk.__code__ = _call_in_one_chunk.__code__.replace(co_stacksize=40_000)


def share_gloo_device() -> None:
    """Let one thread of this process poll the sockets of all its groups.

    torch starts a thread for each group, which wakes a hundred times a second even if no message
    comes. A rank of Megatron has 24 to 88 groups, whose threads would take a tenth of its CPU time.
    """
    device = dist.ProcessGroupGloo.create_device(interface="lo")
    # The device stays referenced as long as the process lives: freeing it waits for its thread, in
    # some cases forever.
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
        """Start a rank, and return its process id."""
        ...

    def exit_code(self, pid: int) -> int | None:
        """Return the rank's exit code, or None while the rank runs. Do not call this again after it
        has returned an exit code."""
        ...


class ThisProcess:
    """Forks ranks from this process. They skip the interpreter's shutdown, which would also clean
    up after the test process."""

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
            # Processes that write a checkpoint are killed, as the interpreter's shutdown would do.
            worker.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if "error" in result else 0)

    def exit_code(self, pid: int) -> int | None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None


class Script:
    """Forks ranks from the top level of this file, run as a script."""

    def __init__(self) -> None:
        self._tests: set[str] = set()  # names of the tests that have had ranks
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
        """Start a rank. The function of ``request`` must be one that another process can import by
        its name."""
        # name of the running test, without its case
        test = re.split(r"[\[ ]", os.environ.get("PYTEST_CURRENT_TEST", ""))[0]
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
    """Running ranks, to be watched, sent signals and waited for."""

    def __init__(self, pids: list[int], parent: Parent, folder: str) -> None:
        self._pids = pids
        self._parent = parent
        self._folder = folder
        self._start = time.monotonic()
        self._ended: dict[int, tuple[int | None, float]] = {}

    def send_signal(self, rank: int, signum: int) -> None:
        os.kill(self._pids[rank], signum)

    def stderr(self, rank: int) -> str:
        """Return what the rank has written to stderr so far."""
        with contextlib.suppress(FileNotFoundError):
            return Path(f"{self._folder}/{rank}.stderr").read_text()
        return ""

    def wait_until_it_says(self, rank: int, text: str) -> None:
        """Wait until ``text`` is in the rank's stderr."""
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
        """Return how the ranks ended, in rank order. Ranks that still run after ``timeout`` seconds
        are killed."""
        end = time.monotonic() + timeout
        while self._alive() and time.monotonic() < end:
            time.sleep(0.01)
        self.kill()
        return [self._result(rank) for rank in range(len(self._pids))]

    def kill(self) -> None:
        """Kill the ranks that still run, and the processes that any rank has left behind."""
        killed = self._alive()
        for rank in killed:
            os.kill(self._pids[rank], signal.SIGKILL)
        while self._alive():
            time.sleep(0.01)
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                # The signal goes to all processes of the rank, such as the writers of a checkpoint.
                os.killpg(pid, signal.SIGKILL)
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
        # A rank that was killed, or a rank of a `Script`, has written no result, or half of one.
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
    """Run ``function(rank)`` on each of ``ranks`` processes, forked from ``parent`` or this
    process.

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
    """Run ``function(rank)`` on each of ``ranks`` forked processes, and return the results in rank
    order.

    A rank that still runs after ``timeout`` seconds is killed, and its exit code is None.
    """
    with running_ranks(ranks, function, connect=connect) as running:
        return running.wait(timeout)


def values(results: list[RankResult]) -> list[Any]:
    """Return the values of ranks, which must all have ended well. If some have failed, the error
    shows the rank that ended first, because others may have failed only because that rank was
    gone."""
    by_end = sorted(enumerate(results), key=lambda item: item[1].seconds)
    for rank, result in by_end:
        assert result.exit_code == 0, (
            f"rank {rank} ended with {result.exit_code} after {result.seconds:.1f} s\n"
            f"{result.error}{result.stderr}"
        )
    return [result.value for result in results]


def use_huge_pages() -> None:
    """Let the kernel move the memory of this process to pages of 2 MiB, which cuts the time to fork
    and end a rank to a third. If the kernel cannot do so, nothing changes."""
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


_MADV_COLLAPSE = 25  # number of this advice in Linux since 6.1


def lasting_folder() -> Path:
    """Return a new folder that several tests share and that is removed when the test process
    ends."""
    _FOLDERS.append(tempfile.TemporaryDirectory())
    return Path(_FOLDERS[-1].name)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@contextlib.contextmanager
def agent_store() -> Iterator[int]:
    """Yield the port of a new store at which ranks meet, like the one of torchrun's agent.

    The store listens before a rank is forked, at a port that the system gives to no other process.
    A port that was only found to be free might be taken when rank 0 starts to listen there.
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
    """Start the process of the stores. They are in a process of their own because threads of the
    test process would be missing in forked ranks."""
    ours, theirs = multiprocessing.Pipe()
    if os.fork():
        theirs.close()
        return ours
    try:
        # All other files and pipes that this process inherited from the test process, such as the
        # end of a `Script`'s pipe, must be closed here too. Otherwise the reader at a pipe's other
        # end would wait forever.
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        # Inherited objects are kept from garbage collection: the file number that one of them would
        # close may by then belong to a store.
        gc.freeze()
        stores = {}
        while True:
            port = theirs.recv()
            if port is None:
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                stores[store.port] = store
                theirs.send(store.port)
            else:
                del stores[port]
    # This process never returns into the tests, even if the test process or Ctrl-C ends it.
    finally:
        os._exit(0)


def torchrun_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables with which torchrun tells a rank its number, on one node, and that its
    agent has the store at ``port`` (`agent_store`)."""
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
    """Serve a `Script`, and return in each rank that it forks."""
    imported = 0
    while True:
        try:
            message = connection.recv()
        except EOFError:
            sys.exit()
        if isinstance(message, int):
            connection.send(ThisProcess().exit_code(message))
            continue
        if imported < len(sys.modules):  # modules were imported for this request
            imported = len(sys.modules)
            # Without this call a rank would collect garbage at its shutdown, and so copy the memory
            # pages of all these modules.
            gc.freeze()
            use_huge_pages()
        pid = os.fork()
        if pid == 0:
            connection.close()
            return message
        connection.send(pid)


def _run_and_leave(request: Request) -> NoReturn:
    """Run the request, and end as the interpreter does, but without destroying modules at the very
    end."""
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
