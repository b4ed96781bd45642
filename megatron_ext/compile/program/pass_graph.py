"""Graph of the waits in a schedule that has only passes, and whose messages are implied.

A pass waits for the previous pass on its rank, and for the passes on other ranks whose messages it
would receive (`kinds`). Receives are posted in time, and no send waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_ext.compile.program.graph import needed, needed_numbers, partner_of
from megatron_ext.compile.program.longest_paths import Precedence
from megatron_ext.compile.program.node_lists import NodeLists
from megatron_ext.schedule.action import Action, slices_of
from megatron_ext.schedule.action_arrays import KINDS, Floats, Ints
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Schedule


@dataclass(frozen=True, eq=False, kw_only=True)
class PassGraph(Precedence):
    """Graph of the passes of a schedule, without messages; two overlapped passes are one node.

    Other nodes take no time.

    Attributes:
        nodes: the node of each pass.
        lags: for each of ``before.nodes``, the seconds of the message between the two nodes.
    """

    nodes: Ints
    lags: Floats


def pass_graph(schedule: Schedule, costs: Costs) -> PassGraph:
    """Return the graph of the passes of ``schedule``; messages are delays, and never queue."""
    arrays = schedule.arrays
    is_second = np.zeros(len(arrays), dtype=bool)
    is_second[schedule.paired + 1] = True
    nodes = (np.cumsum(~is_second) - 1).astype(np.int32)
    (followers, previous), links = _within_ranks(schedule), _links(schedule, costs)
    later, earlier = (
        nodes[np.append(followers, links.later)],
        nodes[np.append(previous, links.earlier)],
    )
    lags = np.append(np.zeros(len(followers)), links.seconds)
    waits = later != earlier  # the second of two overlapped passes does not wait for the first
    later, earlier, lags = later[waits], earlier[waits], lags[waits]
    before = NodeLists.of(later, earlier, int(nodes[-1]) + 1)
    return PassGraph(before=before, nodes=nodes, lags=lags[np.argsort(later, kind="stable")])


def with_messages(schedule: Schedule, costs: Costs) -> tuple[Precedence, list[float]]:
    """Return a graph of the passes and messages of ``schedule``, and the seconds of each node.

    The passes come first. The messages of a channel follow one another. Savings of adjacent or
    overlapping passes do not count. Messages that take no time are no nodes.
    """
    arrays = schedule.arrays
    (followers, previous), links = _within_ranks(schedule), _links(schedule, costs)
    at_once = links.seconds == 0
    channel = np.stack([links.send, arrays.rank[links.later], arrays.rank[links.earlier]])
    order = np.lexsort((links.earlier, *channel))
    order = order[~at_once[order]]
    follows = (np.diff(channel[:, order]) == 0).all(axis=0)
    messages = np.arange(len(arrays), len(arrays) + len(order), dtype=np.int32)
    waits = (
        (followers, previous),
        (links.later[at_once], links.earlier[at_once]),
        (messages, links.earlier[order]),
        (links.later[order], messages),
        (messages[1:][follows], messages[:-1][follows]),
    )
    later, earlier = (np.concatenate(part) for part in zip(*waits, strict=True))
    before = NodeLists.of(later, earlier, len(arrays) + len(order))
    seconds = arrays.of_each(costs.of, bool(costs.at_places))
    return Precedence(before=before), seconds + links.seconds[order].tolist()


def _within_ranks(schedule: Schedule) -> tuple[Ints, Ints]:
    """Return passes, and for each a pass on its rank that it waits for.

    That is the previous pass, or a pass that it depends on although it comes later (which
    deadlocks).
    """
    arrays = schedule.arrays
    followers = arrays.numbers[arrays.numbers > arrays.first]
    waits = [(followers, followers - np.int32(1))]
    for earlier in needed_numbers(arrays, schedule.placement):
        is_late = earlier > arrays.numbers
        waits.append((arrays.numbers[is_late], earlier[is_late]))
    later, earlier = (np.concatenate(part) for part in zip(*waits, strict=True))
    return later, earlier


class _Links(NamedTuple):
    """Arrays that describe messages: the pass that waits for the message and the pass that makes
    it.

    ``send`` is the position of the send's kind in `KINDS`, and ``seconds`` the time of the message.
    """

    later: Ints
    earlier: Ints
    send: Ints
    seconds: Floats


def _links(schedule: Schedule, costs: Costs) -> _Links:
    arrays, place = (
        schedule.arrays,
        {stage_kind: n for n, stage_kind in enumerate(schedule.arrays.stage_kinds)},
    )
    parts = slices_of(0, arrays.slice_ends)
    wanted = [
        [
            (place[maker.stage, maker.kind], send)
            for maker, send in senders(Action(*stage_kind, 0), schedule.placement)
            if (maker.stage, maker.kind) in place
        ]
        for stage_kind in arrays.stage_kinds
    ]
    found = []
    for turn in range(max(map(len, wanted))):
        pairs = np.full(len(wanted), -1, dtype=np.int32)
        kinds = np.zeros(len(wanted), dtype=np.int32)
        seconds = np.zeros((len(wanted), len(parts)))
        for n, row in enumerate(wanted):
            if turn < len(row):
                pairs[n], send = row[turn]
                kinds[n] = KINDS.index(send.kind)
                seconds[n] = [costs.of(send._replace(microbatch=part)) for part in parts]
        earlier = arrays.of_stage_kinds(pairs)
        later = arrays.numbers[earlier >= 0]
        stage_kind = arrays.stage_kind[later]
        found.append(
            (later, earlier[later], kinds[stage_kind], seconds[stage_kind, arrays.slice[later]])
        )
    if not found:
        found = [(arrays.numbers[:0],) * 3 + (np.zeros(0),)]
    return _Links(*(np.concatenate(part) for part in zip(*found, strict=True)))


def senders(action: Action, placement: Placement) -> Iterator[tuple[Action, Action]]:
    """Yield the passes on other ranks whose output ``action`` may receive, each with its send."""
    for _, choices in needed(action, placement):
        for receive in choices:
            if RULES[receive.kind].lane is Lane.RECEIVE:
                send = partner_of(receive, placement)
                for _, makers in needed(send, placement):
                    yield from ((maker, send) for maker in makers)
