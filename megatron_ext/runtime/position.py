"""Where a rank is in its program, and in words."""

from __future__ import annotations

import time
from typing import NamedTuple

from megatron_ext.schedule.action import Action, Pair


class Position(NamedTuple):
    """What a rank does since ``since`` (`time.monotonic` seconds).

    ``peer`` is the pipeline rank it waits for; None while it computes. ``direction``: whether a
    message goes ``to`` the peer or comes ``from`` it, or what it and all other ranks do ``with``
    one another.
    """

    rank: int
    action: Action | Pair
    peer: int | None
    direction: str
    since: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    @property
    def peers(self) -> tuple[int, ...]:
        """The one rank that it waits for; none where it waits for all, or computes."""
        return () if self.peer is None or self.direction == "with" else (self.peer,)

    @property
    def doing(self) -> str:
        if self.peer is None:
            return f"in {self.action}"
        return f"waiting for {self.action} {whom(self.peer, self.direction)}"

    def __str__(self) -> str:
        return f"pipeline rank {self.rank} {self.doing} for {self.seconds:.1f} s"


def whom(peer: int, direction: str) -> str:
    """The words for who is at the other end."""
    if direction == "with":
        return "with the other pipeline ranks"
    return f"{direction} pipeline rank {peer}"
