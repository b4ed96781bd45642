"""Where a rank is in its program: for its watchdog, its error messages, and profilers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_ext.schedule.action import Action


@dataclass(frozen=True)
class Position:
    """What a rank does since ``since`` (`time.monotonic` seconds).

    ``peer`` is the pipeline rank it waits for; None while it computes.
    """

    rank: int
    action: Action
    peer: int | None
    since: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def __str__(self) -> str:
        doing = "in" if self.peer is None else "waiting for"
        peer = "" if self.peer is None else f" with pipeline rank {self.peer}"
        return f"pipeline rank {self.rank} {doing} {self.action}{peer} for {self.seconds:.1f} s"


class Recorder:
    """Keeps the current `Position`; marks compute for Nsight with ranges named by the actions."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position: Position | None = None  # None between steps
        self._ranges = torch.cuda.is_available()

    @contextlib.contextmanager
    def computing(self, action: Action) -> Iterator[None]:
        """Around a pass."""
        if self._ranges:
            torch.cuda.nvtx.range_push(str(action))
        try:
            with self._at(Position(self.rank, action, None, time.monotonic())):
                yield
        finally:
            if self._ranges:
                torch.cuda.nvtx.range_pop()

    @contextlib.contextmanager
    def waiting(self, action: Action, peer: int) -> Iterator[None]:
        """Around a blocking wait for the message ``action``."""
        with self._at(Position(self.rank, action, peer, time.monotonic())):
            yield

    @contextlib.contextmanager
    def _at(self, position: Position) -> Iterator[None]:
        self.position = position
        try:
            yield
        finally:
            self.position = None
