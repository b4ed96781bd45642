"""Who waits for whom in a schedule with messages.

The rules are those the executor keeps and NCCL and gloo impose:

- a rank issues its actions in order, and compute and waits hold up what follows them;
- a channel takes its sends in order, and its receives;
- a message moves when both its send and its receive have been issued (rendezvous);
- what an action needs must be done;
- a collective ends on all ranks together, once all have issued it;
- copies to the host follow one another, and so do copies from it.

A channel carries activations, or gradients, from one rank to another. Its k-th send meets its k-th
receive. On a V both go from a rank to its neighbour, often not in the order in which the neighbour
uses them; with a channel each, neither waits behind the other.

Batched messages (`P2P.BATCHED`) share one communicator, which runs what it is given in order:

- a send moves together with the receives directly before it, every other receive by itself;
- a rank's batches move one after the other, so that a message waits for the batch before its own
  at either end;
- a message is there when all of its batch is.

That is a device whose streams run beside one another. `Device` has the others: nothing promises
that streams do, and a host call can wait for all that has been posted.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import (
    HOST_LANES,
    RULES,
    Lane,
    Need,
    Source,
    Where,
)
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import P2P, Schedule


class Device(enum.Enum):
    """What holds up what a rank does next."""

    PARALLEL = "passes and waits"  # messages, collectives and copies run beside them
    WAITS_AT_PASSES = "passes and waits, which all that was posted before holds up too"
    ONE_QUEUE = "everything"  # as on one hardware queue, or if every call waited for the device


class Channel(NamedTuple):
    """The messages of kind ``send`` from rank ``sender`` to rank ``receiver``."""

    sender: int
    receiver: int
    send: Kind

    def __str__(self) -> str:
        return f"{self.send} {self.sender}>{self.receiver}"


def channel_of(action: Action, placement: Placement) -> Channel:
    """The channel a message travels on."""
    rule = RULES[action.kind]
    here = placement.rank_of[action.stage]
    there = placement.rank_of[action.stage + rule.neighbour]
    if rule.lane is Lane.SEND:
        return Channel(here, there, action.kind)
    assert rule.partner is not None
    return Channel(there, here, rule.partner)


def channels(schedule: Schedule) -> set[Channel]:
    """All channels between the stages of ``schedule``.

    Of an evaluation too those that only training uses: they are made once, and training may follow.
    Those of post-validation are not among them: its messages are the host's.
    """
    rank_of = schedule.placement.rank_of
    stages = range(schedule.placement.stages)
    return {
        channel_of(Action(stage, kind, 0), schedule.placement)
        for kind, rule in RULES.items()
        if rule.lane is Lane.SEND and rule.where is Where.STAGE
        for stage in stages
        if stage + rule.neighbour in stages and rank_of[stage] != rank_of[stage + rule.neighbour]
    }


def partner_of(action: Action) -> Action:
    """The other end of a message."""
    rule = RULES[action.kind]
    assert rule.partner is not None
    return Action(action.stage + rule.neighbour, rule.partner, action.microbatch)


def batches_of(row: Sequence[Action]) -> Iterator[range]:
    """The positions in a rank's ``row`` of the messages that move together, batch after batch."""
    receives = 0  # directly before this position
    for position, action in enumerate(row):
        lane = RULES[action.kind].lane
        if lane is Lane.RECEIVE:
            receives += 1
            continue
        if lane is Lane.SEND:
            yield range(position - receives, position + 1)
        else:
            yield from _alone(position, receives)
        receives = 0
    yield from _alone(len(row), receives)


def _alone(position: int, receives: int) -> Iterator[range]:
    return (range(at, at + 1) for at in range(position - receives, position))


def needed(action: Action, placement: Placement) -> Iterator[tuple[Need, list[Action]]]:
    """For each thing that ``action`` needs, the actions that would do (one of them must)."""
    for need in RULES[action.kind].needs:
        if need.source is Source.OWN:
            stage = action.stage
        elif need.source in _ENDS:
            end = _ENDS[need.source] % placement.stages
            if placement.rank_of[action.stage] != placement.rank_of[end]:
                continue
            if need.source in (Source.FIRST, Source.LAST):
                stage = end
            elif action.stage == end:
                stage = placement.shard_beside(end)
            else:
                continue
        else:
            remote = placement.is_remote(action.stage, need.neighbour)
            if remote is None or remote != (need.source is Source.REMOTE):
                continue
            stage = action.stage if remote else action.stage + need.neighbour
        yield need, [Action(stage, kind, action.microbatch) for kind in need.kinds]


_ENDS = {Source.FIRST: 0, Source.INPUT_SHARD: 0, Source.LAST: -1, Source.OUTPUT_SHARD: -1}


def has_place(kind: Kind, stage: int, placement: Placement, forward_only: bool = False) -> bool:
    """Whether ``kind`` is found on ``stage``, in a schedule (an evaluation's, with
    ``forward_only``) that has such kinds."""
    rule = RULES[kind]
    if forward_only and not rule.in_evaluation:
        return False
    if rule.neighbour and not placement.is_remote(stage, rule.neighbour):
        return False
    if rule.where is Where.STAGE:
        return True
    if rule.where is Where.SHARD:
        return stage == placement.shard_beside(stage)
    if rule.where is Where.GIVER:
        (need,) = rule.needs
        return stage == placement.shard_beside(stage) and not _is_used(
            Action(stage, need.kinds[0], 0), placement, forward_only
        )
    if rule.where is Where.RANK:
        ends = (stage, stage + rule.neighbour)
        return all(end == placement.shard_beside(end) for end in ends)
    return stage == placement.shard_beside(placement.stages - 1)


def _is_used(collective: Action, placement: Placement, forward_only: bool) -> bool:
    """Whether a pass on the rank of ``collective`` needs what it brings."""
    return any(
        collective in choices
        for stage in placement.stages_of[placement.rank_of[collective.stage]]
        for kind, rule in RULES.items()
        if rule.lane is Lane.COMPUTE and has_place(kind, stage, placement, forward_only)
        for _, choices in needed(Action(stage, kind, 0), placement)
    )


class Needs(dict[tuple[int, Kind], list[tuple[int, Kind]]]):
    """By stage and kind of an action, the stages and kinds of all that it may need (`needed`).

    They are the same for every microbatch, so they are made once.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def __missing__(self, key: tuple[int, Kind]) -> list[tuple[int, Kind]]:
        first = needed(Action(*key, 0), self.placement)
        found = self[key] = [(c.stage, c.kind) for _, choices in first for c in choices]
        return found


@dataclass(frozen=True)
class Graph:
    """Actions as numbered nodes with the nodes each must wait for.

    Attributes:
        actions: all actions of all ranks, rank after rank.
        ranks: the rank of each.
        before: for each, the nodes that must have ended before it can start.
        batches: by the node of a batched message, the nodes that move together.
        followers: collectives, but for one node of each, which all its others wait for.
    """

    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    batches: Mapping[int, Sequence[int]]
    followers: frozenset[int]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The nodes, each after all it waits for; shorter than ``actions`` if there is a cycle."""
        waiting = [len(nodes) for nodes in self.before]
        # The nodes after each, as linked lists in three flat ones: a list for each would keep the
        # garbage collector busy. An entry is where a node's list goes on; 0 is the end.
        first, follows, entries = [0] * len(waiting), [0], [0]
        for node in reversed(range(len(waiting))):
            for earlier in self.before[node]:
                follows.append(node)
                entries.append(first[earlier])
                first[earlier] = len(follows) - 1
        ready = deque(node for node, count in enumerate(waiting) if count == 0)
        order = []
        while ready:
            node = ready.popleft()
            order.append(node)
            entry = first[node]
            while entry:
                later = follows[entry]
                waiting[later] -= 1
                if waiting[later] == 0:
                    ready.append(later)
                entry = entries[entry]
        return tuple(order)

    def cycle(self) -> list[Action]:
        """Actions that wait for one another, each for the next and the last for the first."""
        stuck = set(range(len(self.actions))) - set(self.order)
        if not stuck:
            return []
        node = min(stuck)
        path: list[int] = []
        position: dict[int, int] = {}
        while node not in position:
            position[node] = len(path)
            path.append(node)
            node = next(earlier for earlier in self.before[node] if earlier in stuck)
        return [self.actions[n] for n in path[position[node] :]]


def build_graph(
    schedule: Schedule, p2p: P2P = P2P.ASYNC, device: Device = Device.PARALLEL
) -> Graph:
    """The graph of ``schedule``, whose actions are complete and whose needs are all there."""
    placement = schedule.placement
    actions = tuple(action for row in schedule.rows for action in row)
    ranks = tuple(rank for rank, row in enumerate(schedule.rows) for _ in row)
    # Plain tuples are as good a key, and sooner made than actions.
    number: dict[tuple[int, Kind, int], int] = {a: node for node, a in enumerate(actions)}
    before: list[list[int]] = [[] for _ in actions]
    # Then whatever an action needs of its own rank has ended: it comes before it in the row.
    in_row_order = device is Device.ONE_QUEUE
    issued_after: list[list[int]] = [[] for _ in actions]  # what held it up on its rank, if any

    start = 0
    for row in schedule.rows:
        latest: list[int] = []
        posted: list[int] = []  # since, and not waited for
        channel_end: dict[Channel | Kind | Lane, list[int]] = {}
        for node, action in enumerate(row, start=start):
            rule = RULES[action.kind]
            issued_after[node] = latest
            before[node] += latest
            channel = None if in_row_order else _channel(action, placement)
            if channel is not None:
                before[node] += channel_end.get(channel, [])
                channel_end[channel] = [node]
            if rule.holds_up and device is Device.WAITS_AT_PASSES:
                before[node] += posted
                posted.clear()
            if rule.holds_up or in_row_order:
                latest = [node]
            else:
                posted.append(node)
        start += len(row)

    wanted = Needs(placement)
    for node, action in enumerate(actions):
        for stage, kind in () if in_row_order else wanted[action.stage, action.kind]:
            if (earlier := number.get((stage, kind, action.microbatch))) is not None:
                before[node].append(earlier)
        rule = RULES[action.kind]
        if rule.is_message:
            partner = number[partner_of(action)]
            before[node] += [partner] if rule.lane is Lane.RECEIVE else issued_after[partner]
    batches = _move_in_batches(schedule, number, before) if p2p is P2P.BATCHED else {}
    followers = _move_together(actions, before)
    return Graph(actions, ranks, tuple(tuple(nodes) for nodes in before), batches, followers)


def _channel(action: Action, placement: Placement) -> Channel | Kind | Lane | None:
    """What takes ``action`` only after those that its rank has given it before."""
    rule = RULES[action.kind]
    if rule.is_message:
        return channel_of(action, placement)
    if rule.lane is Lane.COLLECTIVE:
        return action.kind
    return rule.lane if rule.lane in HOST_LANES else None


def _move_together(actions: Sequence[Action], before: list[list[int]]) -> frozenset[int]:
    """Add to ``before`` that a collective ends on all ranks together; return `Graph.followers`."""
    leaders: dict[tuple[Kind, int], int] = {}
    followers = set()
    for node, action in enumerate(actions):
        if RULES[action.kind].lane is Lane.COLLECTIVE:
            leader = leaders.setdefault((action.kind, action.microbatch), node)
            if leader != node:
                before[leader] += before[node]
                before[node].append(leader)
                followers.add(node)
    return frozenset(followers)


def _move_in_batches(
    schedule: Schedule, number: dict[tuple[int, Kind, int], int], before: list[list[int]]
) -> dict[int, Sequence[int]]:
    """Add to ``before`` what comes of one communicator; return `Graph.batches`."""
    together: dict[int, Sequence[int]] = {}
    start = 0
    for row in schedule.rows:
        previous: Sequence[int] = ()
        for positions in batches_of(row):
            batch = range(start + positions.start, start + positions.stop)
            for node in batch:
                together[node] = batch
                before[node] += previous
                action = row[node - start]
                if RULES[action.kind].lane is Lane.RECEIVE:
                    before[number[partner_of(action)]] += previous
            previous = batch
        for node, action in enumerate(row, start=start):
            if RULES[action.kind].holds_up:
                for earlier in tuple(before[node]):
                    before[node] += together.get(earlier, ())
        start += len(row)
    return together
