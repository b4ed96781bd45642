"""Abort of a rank's connections after an error.

Ranks that wait at the other ends would otherwise fail only at torch's timeout. With their
connections cut they fail now.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from typing import Any

import torch.distributed as dist

CLOSING_SECONDS = 5.0

# Threads that close process groups, each with the time until which the exit waits for it.
_threads: dict[threading.Thread, float] = {}


def close_groups(groups: dict[Any, dist.ProcessGroup]) -> None:
    """Abort the process ``groups`` and remove them, in bounded time.

    Threads may call this concurrently. All groups are aborted concurrently, because a kernel of one
    NCCL communicator may keep the device from ending another communicator. Gloo closes a group with
    its last reference, once everything that runs on it has ended; a broadcast that waits for its
    root ends when the root closes too. So the first idle rank makes others fail, which then close
    their groups. The wait for groups that do not close is at most `CLOSING_SECONDS`.
    """
    end = time.monotonic() + CLOSING_SECONDS
    while True:
        try:
            _, group = groups.popitem()
        except KeyError:
            break
        thread = threading.Thread(target=_close, args=[[group]], daemon=True)
        del group
        thread.start()
        _threads[thread] = end
    _wait()


# A thread that is inside torch when the interpreter exits would crash the process.
@atexit.register
def _wait() -> None:
    for thread, end in list(_threads.items()):
        thread.join(max(0.0, end - time.monotonic()))
        if not thread.is_alive():
            _threads.pop(thread, None)


def _close(last_reference: list[dist.ProcessGroup]) -> None:
    # Errors of closing a group are hidden: the step's own error is shown, and the main thread may
    # be destroying the groups at the same time.
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        dist.distributed_c10d._abort_process_group(last_reference[0])
    last_reference.clear()
