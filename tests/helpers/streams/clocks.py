"""Vector clocks of emulated streams and of the host.

A stream runs its operations in order. An operation of one stream is ordered before one of another
only if a wait says so. For each stream, the clock of a stream holds the number of operations that
are ordered before the next operation of the clock's stream:

    is_ordered(s, other, time)  <=>  clock(s)[other] >= time

The host has a clock, too: operations that it has waited for are ordered before all that it launches
later.
"""

from __future__ import annotations

Clock = dict[int, int]


class Clocks:
    """Clocks of all streams of a rank, which are numbered in the order of their creation."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._clocks: list[Clock] = []
        self._host: Clock = {}
        self._host_changes = 0
        self._seen_host_changes: list[int] = []

    def add_stream(self, name: str) -> int:
        """Return the number of a new stream."""
        self.names.append(name)
        self._clocks.append({})
        self._seen_host_changes.append(0)
        return len(self.names) - 1

    def launch(self, stream: int) -> int:
        """Return the time of an operation that the host launches on ``stream`` now."""
        clock = self._clocks[stream]
        if self._seen_host_changes[stream] != self._host_changes:
            _join(clock, self._host)
            self._seen_host_changes[stream] = self._host_changes
        time = clock.get(stream, 0) + 1
        clock[stream] = time
        return time

    def snapshot(self, stream: int) -> Clock:
        """Return the clock of an event that is recorded on ``stream`` now."""
        return self._clocks[stream].copy()

    def wait(self, stream: int, behind: Clock) -> None:
        """Let all later work of ``stream`` run after the operations in the clock ``behind``."""
        _join(self._clocks[stream], behind)

    def wait_on_host(self, behind: Clock) -> None:
        """Let the host wait for the operations in the clock ``behind``."""
        _join(self._host, behind)
        self._host_changes += 1

    def wait_for_all_on_host(self) -> None:
        """Let the host wait for all streams."""
        for clock in self._clocks:
            self.wait_on_host(clock)

    def is_ordered(self, stream: int, other: int, time: int) -> bool:
        """Return whether ``stream`` has waited for the operation of ``other`` at ``time``."""
        return max(self._clocks[stream].get(other, 0), self._host.get(other, 0)) >= time

    def has_ended_on_host(self, other: int, time: int) -> bool:
        """Return whether the host has waited for the operation of ``other`` at ``time``."""
        return self._host.get(other, 0) >= time


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time
