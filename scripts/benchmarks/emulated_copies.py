"""Copies to the host and back on emulated clocks: they last what they cost, parallel to passes."""

from __future__ import annotations

import contextlib
import fcntl
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ext.runtime.host.copies import DirectCopies, Piece, Transfer
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.costs import Costs, HostCosts
from megatron_ext.schedule.kinds import HOST_LANES, RULES, Lane


class EmulatedCopies(DirectCopies):
    """A thread a direction, which sleeps. Ranks that share a link wait for its file's lock."""

    def __init__(self, costs: Costs, rank: int, folder: Path) -> None:
        host = costs.host
        assert host is not None
        self._costs = costs
        self._lanes: dict[Lane, queue.SimpleQueue[_Copy]] = {}
        for lane in HOST_LANES:
            self._lanes[lane] = queue.SimpleQueue()
            link = _link(host, rank, lane, folder)
            arguments = self._lanes[lane], link
            threading.Thread(target=_run, args=arguments, daemon=True).start()

    def start(self, action: Action, pieces: Sequence[Piece], after: Transfer | None) -> Transfer:
        copy = _Copy(self._costs.of(action), pieces, after)
        self._lanes[RULES[action.kind].lane].put(copy)
        return copy


class _Copy:
    """A `Transfer` that another thread makes."""

    def __init__(self, seconds: float, pieces: Sequence[Piece], after: Transfer | None) -> None:
        self.seconds, self.pieces, self.after = seconds, pieces, after
        self.is_done = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        self.finish()

    def finish(self) -> None:
        self.is_done.wait()
        if self.error is not None:
            raise self.error


def _run(copies: queue.SimpleQueue[_Copy], link: Path | None) -> None:
    while True:
        copy = copies.get()
        try:
            if copy.after is not None:
                copy.after.finish()
            with _turn_on(link):
                time.sleep(copy.seconds)
            for to, source in copy.pieces:
                to.copy_(source)
        except Exception as error:  # re-raised in the thread that waits for the copy
            copy.error = error
        copy.is_done.set()


def _link(host: HostCosts, rank: int, lane: Lane, folder: Path) -> Path | None:
    """Return the file that stands for a shared link; None if the link is not shared."""
    if not host.is_shared:
        return None
    number, direction = host.link(rank, lane)
    return folder / f"link-{number}-{'both' if direction is None else direction.name}"


@contextlib.contextmanager
def _turn_on(link: Path | None) -> Iterator[None]:
    if link is None:
        yield
        return
    with link.open("w") as file:  # each opens it for itself: locks are the opened file's
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
