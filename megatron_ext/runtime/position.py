"""Position of a rank in its program, and its text.

Errors, the watchdog and profilers all say where a rank is, in the same words.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from megatron_ext.runtime.store.agreement import listed
from megatron_ext.schedule.action import Action, OverlappedPasses


class Position(NamedTuple):
    """Action that a rank is in, or the connection that it is making, since ``since`` (seconds).

    ``since`` is in `time.monotonic` seconds. ``peer`` is the pipeline rank that the rank waits for;
    None while it computes. ``direction`` is "to" or "from" for a message to or from the peer, and
    "with" for a collective of all ranks. ``missing`` are the global ranks of a connection that are
    not known to have come to it.
    """

    rank: int
    action: Action | OverlappedPasses | str
    peer: int | None
    direction: str
    since: float
    missing: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    @property
    def peers(self) -> tuple[int, ...]:
        """Tuple with the one pipeline rank that this rank waits for.

        The tuple is empty if this rank waits for all ranks, or computes.
        """
        return () if self.peer is None or self.direction == "with" else (self.peer,)

    @property
    def doing(self) -> str:
        if self.peer is None:
            return f"in {self.action}"
        peers = whom(self.peer, self.direction)
        if self.direction == "with" and self.missing:
            peers = f"with {listed(self.missing)}"
        return f"waiting for {self.action} {peers}"

    def __str__(self) -> str:
        return f"pipeline rank {self.rank} {self.doing} for {self.seconds:.1f} s"


def whom(peer: int, direction: str) -> str:
    """Return the words for the rank or ranks with which an action communicates."""
    if direction == "with":
        return "with the other pipeline ranks"
    return f"{direction} pipeline rank {peer}"
