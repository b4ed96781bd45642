"""A model of devices: what hosts give to streams, who waits for whom there, and what can go wrong.

A stream runs what it is given in order. A wait for an event is for its latest record before, in the
host's order. A collective runs on all its ranks together, the n-th of a group on one rank with the
n-th on another, and so does a message, the n-th of a channel.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any


class What(enum.StrEnum):
    NODE = "node"  # of a plan
    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "receive"
    RECORD = "record"
    WAIT = "wait"


@dataclass(frozen=True)
class Given:
    """``which``: event; plan and name of a node; group and name of a collective; channel."""

    stream: str
    what: What
    which: Any


_Together = tuple[str, Hashable, int]  # what several ranks do at once
_Key = tuple[int, int] | _Together  # rank and place


def orders_of_collectives(ranks: Sequence[Sequence[Given]]) -> dict[Any, list[list[str]]]:
    """By group, the names of its collectives in the order of each of its ranks."""
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
    """Nodes of a plan that may run before the one in front of them, which makes what they read, on
    a device that has this ``row`` to do; and collectives of one group likewise, which other ranks
    may then run in another order."""
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
    """How many nodes of one plan may run while one of another does."""
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
    """For all that a rank is given, the places behind which it runs, as bits."""
    behind: list[int] = []
    for waits in _waits(row):
        bits = 0
        for earlier in waits:
            bits |= behind[earlier] | 1 << earlier
        behind.append(bits)
    return behind


def _waits(row: Sequence[Given]) -> list[list[int]]:
    """For each, what it waits for on its own device."""
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
    """A cycle of waits between ranks, in words; empty if there is none. ``one_queue``: all that a
    rank is given may hold up what comes after it, whatever its stream."""
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
    """A node of the graph for each that ``rank`` is given; one for all ranks of a collective, and
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
