"""End of this rank in bounded time after another rank has failed.

Its connections are cut, so that its step raises an exception once the main thread reaches the next
action. If the main thread does not end within the grace time, the process exits.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence

from megatron_ext.runtime import watchdog
from megatron_ext.runtime.messages.transport import Closable
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.store.failure_report import FailureReport, connect_failure_report


def listen(recorder: Recorder, connections: Sequence[Closable]) -> FailureReport | None:
    """Connect the failure report of ``recorder`` and start to listen for other ranks' failures,
    which close ``connections``. Return the report; None if torch has no store. Collective over the
    world."""
    report = recorder.failure_report = connect_failure_report()
    if report is not None:
        report.start(Interruption(recorder, connections))
    return report


class Interruption:
    """Callback for the thread that learns of another rank's failure: closes ``connections`` if a
    step of ``recorder`` runs, and ends the process if its main thread does not."""

    def __init__(self, recorder: Recorder, connections: Sequence[Closable]) -> None:
        self._recorder = recorder
        # Weak: the thread that may call this must not keep unused connections alive.
        self._connections = [weakref.ref(connection) for connection in connections]

    def __call__(self, words: str) -> None:
        """End this rank, because another has failed and left the report ``words``. Never called by
        the main thread."""
        recorder = self._recorder
        if recorder.has_failed:
            return  # its own error is the one to show
        where = recorder.report()
        recorder.interruption = words
        # Between steps the device must not go on with what an aborted message has left behind: a
        # step's end would take it for gradients. Within, the host notices before it leaves the
        # step, and not the other way round: it says so first.
        if recorder.in_step:
            for reference in self._connections:
                connection = reference()
                if connection is not None:  # to abort a communicator may take long
                    threading.Thread(target=connection.close, daemon=True).start()
        watchdog.say(f"{where}: it ends, as another rank has failed: {words}")
        end = time.monotonic() + watchdog.GRACE_SECONDS
        while not recorder.has_failed:
            if time.monotonic() > end:
                os._exit(1)
            time.sleep(0.05)
