"""Abort of a rank's connections, so that ranks waiting at the other ends fail now and not at
torch's timeout."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from typing import Any

import torch.distributed as dist

CLOSING_SECONDS = 5.0

_threads: list[threading.Thread] = []  # each closes a group


def close_groups(groups: dict[Any, dist.ProcessGroup]) -> None:
    """Abort ``groups`` and forget them. Returns in bounded time; two threads may call it at once.

    All groups are aborted concurrently. NCCL ends a communicator only when the device lets it, and
    a kernel of a communicator not yet aborted may prevent that. Gloo closes a group with its last
    reference, after what runs on it has ended, and a broadcast posted ahead ends when its root
    closes too: the first idle rank makes others fail, which then close theirs. A rank that hangs
    closes nothing, and is waited for `CLOSING_SECONDS` at most.
    """
    while True:
        try:
            _, group = groups.popitem()
        except KeyError:
            break
        thread = threading.Thread(target=_close, args=[[group]], daemon=True)
        del group
        thread.start()
        _threads.append(thread)
    _wait()


# A thread that is in torch when the interpreter goes would take the process down with it.
@atexit.register
def _wait() -> None:
    end = time.monotonic() + CLOSING_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))
    _threads[:] = [thread for thread in _threads if thread.is_alive()]


def _close(last_reference: list[dist.ProcessGroup]) -> None:
    # The step's own error is the one to show; its main thread may be destroying groups meanwhile.
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        dist.distributed_c10d._abort_process_group(last_reference[0])
    last_reference.clear()
