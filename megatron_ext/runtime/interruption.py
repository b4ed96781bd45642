"""End this rank in bounded time when another has failed.

Its step ends by an exception if its main thread comes to the next action: what it waits for is cut
off. A main thread that does not come out, wherever it is, is not waited for.
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


class Interruption:
    """Of the steps that ``recorder`` watches, whose messages travel on ``connections``."""

    def __init__(self, recorder: Recorder, connections: Sequence[Closable]) -> None:
        self._recorder = recorder
        # Weak: the thread that may call this must not keep alive what nobody uses any more.
        self._connections = [weakref.ref(connection) for connection in connections]

    def __call__(self, words: str) -> None:
        """Another rank has left ``words``. Not to be called by the main thread."""
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
