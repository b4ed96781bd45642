"""Cut a rank's connections, so that whoever waits at their other ends fails now, and not only at
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
    """Abort ``groups`` and forget them. Returns in bounded time; two threads may do it at once.

    All at the same time, none after another. NCCL ends a communicator when the device lets it,
    which may be held up by a kernel of one that is still to be aborted. Gloo closes a group with
    the last reference to it and when what runs on it has ended, and a broadcast that has been
    posted ahead ends when its root closes too: the first that is idle makes others fail, who then
    close theirs. A rank that hangs closes nothing, and is not waited for long.
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
