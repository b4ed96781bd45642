"""Work that one rank of a job, its leader, does for all.

A search on every rank would take minutes of every core of a node. Global rank 0 does it, or the
first rank that needs it if rank 0 does not. The others poll torch's store for the result: they are
in no collective, whose timeout could be shorter than the work.

A process that is killed reports nothing. The leader therefore writes heartbeats, and the others
notice when they stop.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from megatron_ext.base.logger import logger
from megatron_ext.base.progress import reporting
from megatron_ext.runtime.store.lost_store import losing_the_store

LOOK_SECONDS = 0.5  # longest pause in seconds between two polls of the store
BEAT_SECONDS = 2.0  # seconds between two heartbeats of the working rank
# Seconds without a heartbeat after which the working rank counts as gone. A heartbeat may come late
# while code is compiled.
SILENT_SECONDS = 60.0
# Seconds that other ranks wait for global rank 0 to begin the work before one of them does.
AHEAD_SECONDS = 5.0

_WORKER, _BEATS, _RESULT = "worker", "signs of life", "result"


def run_on_leader[T](store: dist.Store, rank: int, what: str, work: Callable[[], T]) -> T:
    """Return the result of ``work``, which only one of the calling ranks (the leader) does.

    The result must be picklable. ``rank`` is the global one. ``store`` is for this work alone (a
    `PrefixStore`). ``what`` names the work in errors: "the search for v-auto".

    Raises:
        ValueError: raised by ``work``; on every rank.
        RuntimeError: on the waiting ranks, if ``work`` has failed otherwise or the leader has died.
    """
    here = f"global rank {rank} on {socket.gethostname()}"
    with losing_the_store(f"{here} requested {what}"):
        for seconds in _looks():
            if rank == 0 or seconds > AHEAD_SECONDS or store.check([_WORKER]):
                break
        packed = store.get(_RESULT) if store.check([_RESULT]) else None
        worker = store.compare_set(_WORKER, "", here).decode()
    if packed is None and worker != here:
        packed = _result_of_another(store, worker, what)
    if packed is not None:
        return _unpacked(packed)
    try:
        with _giving_signs_of_life(store), reporting(logger.info, logger.warning):
            result = work()
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store may be gone, too
            store.set(_RESULT, _packed(_for_others(error, what, here)))
        # The failing rank waits, so that other ranks can read the error: the store may end with
        # this process.
        time.sleep(2 * LOOK_SECONDS)
        raise
    with losing_the_store(f"{here} was to tell the result of {what}"):
        store.set(_RESULT, _packed(result))
    return result


def _for_others(error: BaseException, what: str, here: str) -> Exception:
    if isinstance(error, ValueError):
        return error
    return RuntimeError(f"{what} failed on {here}, for all ranks: {type(error).__name__}: {error}")


def _result_of_another(store: dist.Store, worker: str, what: str) -> bytes:
    """Wait for the packed result of ``worker``, another rank.

    Raise RuntimeError if it does not come.
    """
    heard, beats = 0.0, -1
    for seconds in _looks():
        with losing_the_store(f"{worker} was at {what}, for all ranks"):
            if store.check([_RESULT]):
                return store.get(_RESULT)
            latest = store.add(_BEATS, 0)
        if latest != beats:
            heard, beats = seconds, latest
        elif seconds - heard > SILENT_SECONDS:
            break
    raise RuntimeError(
        f"{worker} was at {what} on behalf of all ranks, and has shown no progress for "
        f"{SILENT_SECONDS:.0f} s: it has ended or was killed (was there memory enough?)"
    )


def _looks() -> Iterator[float]:
    """Yield the seconds since the first poll of the store, once per poll, with growing pauses."""
    start, pause = time.monotonic(), 0.01
    while True:
        yield time.monotonic() - start
        time.sleep(pause)
        pause = min(1.5 * pause, LOOK_SECONDS)


@contextlib.contextmanager
def _giving_signs_of_life(store: dist.Store) -> Iterator[None]:
    over = threading.Event()

    def give() -> None:
        # A lost store ends the heartbeats, and no rank can read them then.
        with contextlib.suppress(RuntimeError):
            while not over.wait(BEAT_SECONDS):
                store.add(_BEATS, 1)

    thread = threading.Thread(target=give, name="megatron_ext signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _packed(value: object) -> str:
    """Return ``value`` as text, compressed because all ranks fetch it from one process."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def _unpacked(text: bytes) -> Any:
    """Return the result of a packed text, or raise it if it is an error."""
    result = pickle.loads(zlib.decompress(base64.b64decode(text)))
    if isinstance(result, Exception):
        raise result
    return result
