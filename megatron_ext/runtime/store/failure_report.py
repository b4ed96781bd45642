"""Report of a failing rank to all others, through torch's store.

On gloo, ranks that wait for a failed one fail when its connections are cut. On NCCL a wait returns
at once, and the others would go on until their devices hang, and then until torch's timeout. Even
gloo does not tell the ranks of other pipelines, which wait in a reduction, and forgets a send that
was under way when the connection broke (`tx_` in its `Pair::signalException`).

Each rank polls the store once a second, in a thread of its own: a store that does not answer delays
neither the passes nor the watchdog. A rank whose training ends without an error leaves a note, for
those that still wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from megatron_ext.runtime.store.lost_store import losing_the_store
from megatron_ext.runtime.store.start import keys_of_start
from megatron_ext.runtime.world import store_of_all

LOOK_SECONDS = 1.0
TRIES = 3  # polls without an answer after which the store counts as gone
LEAVE_SECONDS = 5.0  # longest time in seconds that a failing rank waits for a store without answer


class FailureReport:
    """Report of the first rank to fail, which the ranks with the same ``store`` and ``key`` share.

    ``rank`` is the global one. A process that is forked from this one reports nothing.
    """

    def __init__(self, store: dist.Store, key: str, rank: int = 0) -> None:
        self._store = store
        self._key = key
        self._rank = rank
        self._process = os.getpid()
        self._where: Callable[[], str] = str
        self._hear: Callable[[str], None] | None = None
        self._words: str | None = None
        # Time (`time.monotonic`, seconds) until which this process does not exit, as others read
        # its store.
        self._stays_until = 0.0
        self._wake = threading.Event()
        self._has_left = threading.Event()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def start(self, hear: Callable[[str], None], where: Callable[[], str] = str) -> None:
        """Start to poll the store for reports, in a thread.

        ``hear`` is called once with another rank's report, in that thread. ``where`` is called if
        this rank ends without an error, and returns where the rank is, in words.
        """
        self._hear, self._where = hear, where
        self._thread = threading.Thread(
            target=self._run, name="megatron_ext failure report", daemon=True
        )
        self._thread.start()
        # The thread must have left torch before the interpreter exits, or the process would crash.
        atexit.register(self.stop)

    def leave(self, words: str) -> None:
        """Report ``words`` as this rank's failure, unless another rank has failed first.

        Returns within `LEAVE_SECONDS`.
        """
        if os.getpid() != self._process:
            return
        self._words = words
        self._wake.set()
        self._has_left.wait(LEAVE_SECONDS)

    def why_gone(self, ranks: Sequence[int]) -> tuple[str, str]:
        """Return why one of the global ``ranks`` may be gone.

        The result is the report of the first rank to fail, and the place of the first of ``ranks``
        that has ended without an error; "" for what is not known. Returns within `LEAVE_SECONDS`.
        """
        failed, ended = list[str](), list[str]()

        def look() -> None:
            # Torch raises a RuntimeError if the store is gone.
            with contextlib.suppress(RuntimeError):
                failed.extend(self._value(self._key))
                for rank in ranks:
                    ended.extend(self._value(self._ended(rank)))

        thread = threading.Thread(target=look, name="megatron_ext failure look-up", daemon=True)
        thread.start()
        thread.join(LEAVE_SECONDS)
        return "".join(failed[:1]), "".join(ended[:1])

    def stop(self) -> None:
        """Stop polling.

        If the store lives in this process, this call first gives other ranks time to read the
        report.
        """
        if os.getpid() != self._process:
            return
        atexit.unregister(self.stop)
        time.sleep(max(0.0, self._stays_until - time.monotonic()))
        self._is_stopped = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LEAVE_SECONDS)

    def _run(self) -> None:
        words = None
        for _ in range(TRIES):
            try:
                words = self._listen()
                break
            # The store has not answered; at the end of a training it may have ended with its
            # process.
            except RuntimeError:
                self._wake.wait(LOOK_SECONDS)
        self._has_left.set()
        if words is not None:
            assert self._hear is not None
            self._hear(words)

    def _listen(self) -> str | None:
        """Poll until another rank's report is in the store, and return the report.

        Returns None if this rank has reported a failure of its own, or has been stopped. A rank
        that is stopped writes so into the store, for the other ranks.
        """
        while not self._is_stopped:
            if self._words is not None:
                self._store.compare_set(self._key, "", self._words)
                if self._keeps_the_store():
                    self._stays_until = time.monotonic() + 2 * LOOK_SECONDS
                return None
            for words in self._value(self._key):
                return words
            self._wake.wait(LOOK_SECONDS)
        self._store.set(self._ended(self._rank), self._where())
        return None

    def _value(self, key: str) -> list[str]:
        """Return the value of ``key`` in the store; empty if it has none."""
        is_set = self._store.check([key])
        return [self._store.get(key).decode(errors="replace")] if is_set else []

    def _ended(self, rank: int) -> str:
        """Return the store's key under which ``rank`` notes its end without an error."""
        return f"{self._key}/ended by {rank}"

    def _keeps_the_store(self) -> bool:
        """Return whether the store ends with this process."""
        store = self._store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return isinstance(store, dist.TCPStore) and self._rank == 0 and not has_agent


def connect_failure_report() -> FailureReport | None:
    """Return the failure report that all ranks share; None if no other rank uses torch's store.

    Waits for no rank.
    """
    store, rank = store_of_all(), dist.get_rank()
    if store is None:
        return None
    prefix = "megatron_ext/failure_report"
    with losing_the_store(f"global rank {rank} began to listen for failures"):
        # The key contains a count, since an earlier training may have left reports in the store.
        # All ranks begin trainings equally often.
        store = keys_of_start(store)
        number = store.add(f"{prefix}/begun by {rank}", 1)
        # The thread has a clone of the store, since a store that waits in one thread blocks the
        # others. (Older stores cannot be cloned.)
        store = store.clone() if hasattr(store, "clone") else store
    return FailureReport(store, f"{prefix}/{number}", rank)
