"""A model of devices: work that hosts give to streams, the waits between streams, and faults of
both.

A stream runs its work in order. A wait for an event is for the event's latest record before it, in
the host's order. A collective runs on all its ranks together: the n-th of a group on one rank with
the n-th on another. So does a message, the n-th of a channel.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any


class What(enum.StrEnum):
    NODE = "node"  # a node runs; an overlapped plan of Megatron consists of nodes
    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "receive"
    RECORD = "record"
    WAIT = "wait"


@dataclass(frozen=True)
class Given:
    """Work that a host gives to a stream. ``which`` is an event; the plan and name of a node; the
    group and name of a collective; or a channel."""

    stream: str
    what: What
    which: Any


_Together = tuple[str, Hashable, int]  # key of work that several ranks do at once
_Key = tuple[int, int] | _Together  # key of an item: its rank and position, or that of common work


def orders_of_collectives(ranks: Sequence[Sequence[Given]]) -> dict[Any, list[list[str]]]:
    """Return, for each group, the names of its collectives in the order of each of its ranks."""
    orders = defaultdict(list)
    for rank, row in enumerate(ranks):
        own = defaultdict(list)
        for given in row:
            if given.what is What.COLLECTIVE:
                group, name = given.which
                own[group].append(f"{name} on {given.stream}")
        for group, names in own.items():
            assert rank in group[0]
            orders[group].append(names)
    return orders


def unordered(row: Sequence[Given]) -> list[tuple[Any, Any]]:
    """Return pairs of works that a device with this ``row`` of work may run in the wrong order.

    A pair is two successive nodes of a plan, the second of which reads the first one's output, or
    two successive collectives of one group, which ranks may then run in different orders.
    """
    behind = _behind(row)
    latest: dict[Any, int] = {}
    wrong = []
    for place, given in enumerate(row):
        if given.what not in (What.NODE, What.COLLECTIVE):
            continue
        chain = given.what, given.which[0]
        before = latest.get(chain)
        if before is not None and not behind[place] >> before & 1:
            wrong.append((row[before].which, given.which))
        latest[chain] = place
    return wrong


def side_by_side(row: Sequence[Given]) -> int:
    """Return how many nodes of one plan may run while a node of another plan does."""
    behind = _behind(row)
    nodes = [place for place, given in enumerate(row) if given.what is What.NODE]
    return sum(
        any(
            row[other].which[0] != row[node].which[0]
            and not (behind[node] >> other & 1 or behind[other] >> node & 1)
            for other in nodes
        )
        for node in nodes
    )


def _behind(row: Sequence[Given]) -> list[int]:
    """Return, for all work of a rank, the places of the work before it, as the bits of a number."""
    behind: list[int] = []
    for waits in _waits(row):
        bits = 0
        for earlier in waits:
            bits |= behind[earlier] | 1 << earlier
        behind.append(bits)
    return behind


def _waits(row: Sequence[Given]) -> list[list[int]]:
    """Return, for all work of a rank, the places that it waits for on its own device."""
    streams: dict[str, int] = {}
    records: dict[Any, int] = {}
    waits = []
    for place, given in enumerate(row):
        before = [streams[given.stream]] if given.stream in streams else []
        if given.what is What.WAIT and given.which in records:
            before.append(records[given.which])
        if given.what is What.RECORD:
            records[given.which] = place
        streams[given.stream] = place
        waits.append(before)
    return waits


def hangs(ranks: Sequence[Sequence[Given]], *, one_queue: bool) -> str:
    """Return a cycle of waits between ranks as text, or an empty text. ``one_queue``: all work of a
    rank may block the work after it, on whichever stream."""
    graph: dict[_Key, set[_Key]] = defaultdict(set)
    for rank, row in enumerate(ranks):
        keys = _keys(rank, row)
        waits = [[place - 1] if place else [] for place in range(len(row))]
        for place, before in enumerate(waits if one_queue else _waits(row)):
            graph[keys[place]] |= {keys[earlier] for earlier in before}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " behind ".join(map(str, error.args[1]))
    return ""


def _keys(rank: int, row: Sequence[Given]) -> list[_Key]:
    """Return the graph's node for each work of ``rank``: one for all ranks of a collective, and one
    for both ends of a message."""
    counts: dict[Hashable, int] = defaultdict(int)
    keys: list[_Key] = []
    for place, given in enumerate(row):
        if given.what is What.COLLECTIVE:
            whose: Hashable = given.which[0]
        elif given.what in (What.SEND, What.RECEIVE):
            whose = given.which
        else:
            keys.append((rank, place))
            continue
        keys.append(("together", whose, counts[whose]))
        counts[whose] += 1
    return keys
