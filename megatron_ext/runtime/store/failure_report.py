"""Report of a failing rank to all others, through torch's store.

On gloo, ranks that wait for a failed one fail when its connections are cut. On NCCL a wait returns
at once, and the others would go on until their devices hang, and then until torch's timeout. Even
gloo does not tell the ranks of other pipelines, which wait in a reduction, and forgets a send that
was under way when the connection broke (`tx_` in its `Pair::signalException`).

Each rank polls the store once a second, in a thread of its own: a store that does not answer delays
neither the passes nor the watchdog.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from megatron_ext.runtime.world import tell_all

LOOK_SECONDS = 1.0
TRIES = 3  # after so many polls without an answer the store counts as gone
LEAVE_SECONDS = 5.0  # limit of a failing rank's wait for an unresponsive store


class FailureReport:
    """Report of the first rank to fail, shared by the ranks with the same ``store`` and ``key``."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store = store
        self._key = key
        self._hear: Callable[[str], None] | None = None
        self._own: str | None = None
        self._stays_until = 0.0  # `time.monotonic` seconds; others read a store that is here
        self._wake = threading.Event()
        self._has_left = threading.Event()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def start(self, hear: Callable[[str], None]) -> None:
        """Start to poll. ``hear`` is called once with another rank's report, in a thread."""
        self._hear = hear
        self._thread = threading.Thread(
            target=self._run, name="megatron_ext failure report", daemon=True
        )
        self._thread.start()
        # A thread that is in torch when the interpreter goes would take the process down with it.
        atexit.register(self.stop)

    def leave(self, words: str) -> None:
        """Report ``words`` to the other ranks, unless another rank was first. Returns within
        `LEAVE_SECONDS`."""
        self._own = words
        self._wake.set()
        self._has_left.wait(LEAVE_SECONDS)

    def stop(self) -> None:
        """Stop polling. If the store lives in this process, wait until other ranks have read it."""
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
            except RuntimeError:  # no answer; or gone with its process, as a training ends
                self._wake.wait(LOOK_SECONDS)
        self._has_left.set()
        if words is not None:
            assert self._hear is not None
            self._hear(words)

    def _listen(self) -> str | None:
        """Poll until another rank's report is there, and return it; None if stopped, or if this
        rank has reported itself."""
        while not self._is_stopped:
            if self._own is not None:
                self._store.compare_set(self._key, "", self._own)
                if _ends_with_this_process(self._store):
                    self._stays_until = time.monotonic() + 2 * LOOK_SECONDS
                return None
            if self._store.check([self._key]):
                return self._store.get(self._key).decode(errors="replace")
            self._wake.wait(LOOK_SECONDS)
        return None


def connect_failure_report() -> FailureReport | None:
    """Return the report of all ranks; None if torch has no store (MPI). Collective over the world.

    The key is new each time: a store may outlive the ranks, and then has reports of ranks that were
    restarted since.
    """
    key = tell_all(f"megatron_ext/failure_report/{uuid.uuid4().hex}")
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        return None
    # A clone: a store blocks other threads while one waits. (Older stores cannot be cloned.)
    return FailureReport(store.clone() if hasattr(store, "clone") else store, key)


def _ends_with_this_process(store: dist.Store) -> bool:
    """Whether ``store`` ends with this process."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return isinstance(store, dist.TCPStore) and dist.get_rank() == 0 and not has_agent
