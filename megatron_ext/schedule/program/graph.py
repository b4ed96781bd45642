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
from functools import cache, cached_property
from typing import NamedTuple

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import (
    HOST_LANES,
    RULES,
    Lane,
    Need,
    Rule,
    Source,
    Where,
)
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import P2P
from megatron_ext.schedule.schedule import Schedule


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
    other = partner_of(action, placement)
    here, there = placement.rank_of[action.stage], placement.rank_of[other.stage]
    if RULES[action.kind].lane is Lane.SEND:
        return Channel(here, there, action.kind)
    return Channel(there, here, other.kind)


def channels(schedule: Schedule) -> set[Channel]:
    """All channels between the stages of ``schedule``.

    Of an evaluation too those that only training uses: they are made once, and training may follow.
    Those of post-validation are not among them: its messages are the host's.
    """
    placement = schedule.placement
    return {
        channel_of(Action(stage, kind, 0), placement)
        for kind, rule in RULES.items()
        if rule.lane is Lane.SEND and rule.where is Where.STAGE
        for stage in range(placement.stages)
        if has_place(kind, stage, placement)
    }


def partner_of(action: Action, placement: Placement) -> Action:
    """The other end of a message."""
    rule = RULES[action.kind]
    assert rule.partner is not None and rule.neighbour is not None
    other = placement.neighbour(action.stage, rule.neighbour)
    assert other is not None, f"{action} has no other end"
    return Action(other, rule.partner, action.microbatch)


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
            yield from _receives_alone(position, receives)
        receives = 0
    yield from _receives_alone(len(row), receives)


def _receives_alone(position: int, receives: int) -> Iterator[range]:
    return (range(at, at + 1) for at in range(position - receives, position))


def needed(action: Action, placement: Placement) -> Iterator[tuple[Need, list[Action]]]:
    """For each thing that ``action`` needs, the actions that would do (one of them must)."""
    for need in RULES[action.kind].needs:
        stage = _looked_for_on(need, action.stage, placement)
        if stage is not None:
            yield need, [Action(stage, kind, action.microbatch) for kind in need.kinds]


def _looked_for_on(need: Need, stage: int, placement: Placement) -> int | None:
    """The stage where ``need`` of an action on ``stage`` is looked for; None: nothing is needed."""
    if need.source is Source.OWN:
        return stage
    if need.source in (Source.LOCAL, Source.REMOTE):
        assert need.neighbour is not None
        is_remote = placement.is_remote(stage, need.neighbour)
        if is_remote is not (need.source is Source.REMOTE):
            return None
        return stage if is_remote else placement.neighbour(stage, need.neighbour)
    end = _ENDS[need.source] % placement.stages
    if placement.rank_of[stage] != placement.rank_of[end]:
        return None
    if need.source in (Source.FIRST, Source.LAST):
        return end
    return placement.shard_beside(end) if stage == end else None


_ENDS = {Source.FIRST: 0, Source.INPUT_SHARD: 0, Source.LAST: -1, Source.OUTPUT_SHARD: -1}


def has_place(
    kind: Kind,
    stage: int,
    placement: Placement,
    forward_only: bool = False,
    first_trained: int = 0,
) -> bool:
    """Whether ``kind`` is found on ``stage``, in a schedule (an evaluation's, with
    ``forward_only``) that has such kinds, where nothing before ``first_trained`` is trained."""
    rule = RULES[kind]
    if forward_only and not rule.in_evaluation:
        return False
    if rule.neighbour is not None and not placement.is_remote(stage, rule.neighbour):
        return False
    if rule.where is Where.STAGE:
        return rule.in_evaluation or first_trained <= _first_of(rule, stage, placement)
    if rule.where is Where.SHARD:
        return stage == placement.shard_beside(stage)
    if rule.where is Where.GIVER:
        (need,) = rule.needs
        return stage == placement.shard_beside(stage) and not _is_used(
            Action(stage, need.kinds[0], 0), placement, forward_only
        )
    if rule.where is Where.RANK:
        ends = [stage]
        if rule.is_message:
            ends.append(partner_of(Action(stage, kind, 0), placement).stage)
        return all(end == placement.shard_beside(end) for end in ends)
    return stage == placement.shard_beside(placement.last)


def _first_of(rule: Rule, stage: int, placement: Placement) -> int:
    """The first of the stages that ``rule`` is about: ``stage``, and a message's other end."""
    if rule.neighbour is None:
        return stage
    other = placement.neighbour(stage, rule.neighbour)
    assert other is not None
    return min(stage, other)


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
        self[key] = [(c.stage, c.kind) for _, choices in first for c in choices]
        return self[key]


@dataclass(frozen=True)
class Graph:
    """Actions as numbered nodes with the nodes each must wait for.

    Attributes:
        actions: all actions of all ranks, rank after rank.
        ranks: the rank of each.
        before: for each, the nodes that must have ended before it can start.
        partners: by the node of a message, that of its other end.
        batches: by the node of a batched message, the nodes that move together.
        followers: collectives, but for one node of each, which all its others wait for.
    """

    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    partners: Mapping[int, int]
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

    def longest_paths(
        self, seconds: Sequence[float], earliest: Sequence[float] | None = None
    ) -> tuple[list[float], list[float]]:
        """When each node starts and ends, if it starts as soon as all it waits for has ended.

        What waits in a circle starts at its earliest and ends at 0.

        Args:
            seconds: what each node takes. (Any unit of time; whole numbers stay whole.)
            earliest: before which each does not start; 0 if not given.
        """
        zeros: list[float] = [0] * len(self.actions)
        starts, ends = list(earliest or zeros), list(zeros)
        for node in self.order:
            start = starts[node]
            for earlier in self.before[node]:
                if ends[earlier] > start:
                    start = ends[earlier]
            starts[node] = start
            ends[node] = start + seconds[node]
        return starts, ends

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
    issued_after = _wait_in_rows(schedule, device, before)

    needs = Needs(placement)
    # The same for every microbatch.
    other_end = cache(lambda stage, kind: partner_of(Action(stage, kind, 0), placement)[:2])
    partners: dict[int, int] = {}
    for node, action in enumerate(actions):
        stage, kind, microbatch = action
        if device is not Device.ONE_QUEUE:
            # There whatever an action needs has ended: it comes before it in its row.
            for needed_stage, needed_kind in needs[stage, kind]:
                earlier = number.get((needed_stage, needed_kind, microbatch))
                if earlier is not None:
                    before[node].append(earlier)
        rule = RULES[kind]
        if rule.is_message:
            partner = partners[node] = number[(*other_end(stage, kind), microbatch)]
            before[node] += [partner] if rule.lane is Lane.RECEIVE else issued_after[partner]
    batches = _move_in_batches(schedule, partners, before) if p2p is P2P.BATCHED else {}
    followers = _move_together(actions, before)
    waits_for = tuple(tuple(nodes) for nodes in before)
    return Graph(actions, ranks, waits_for, partners, batches, followers)


def _wait_in_rows(schedule: Schedule, device: Device, before: list[list[int]]) -> list[list[int]]:
    """Add to ``before`` what a rank's own row imposes; return what held each node up, if any."""
    issued_after: list[list[int]] = []
    # The same for every microbatch.
    queue_of = cache(lambda stage, kind: _queue(Action(stage, kind, 0), schedule.placement))
    for row in schedule.rows:
        latest: list[int] = []
        posted: list[int] = []  # since, and not waited for
        queue_end: dict[Channel | Kind | Lane, list[int]] = {}
        for node, action in enumerate(row, start=len(issued_after)):
            issued_after.append(latest)
            before[node] += latest
            if device is Device.ONE_QUEUE:
                latest = [node]
                continue
            queue = queue_of(action.stage, action.kind)
            if queue is not None:
                before[node] += queue_end.get(queue, [])
                queue_end[queue] = [node]
            if not RULES[action.kind].holds_up:
                posted.append(node)
                continue
            if device is Device.WAITS_AT_PASSES:
                before[node] += posted
                posted.clear()
            latest = [node]
    return issued_after


def _queue(action: Action, placement: Placement) -> Channel | Kind | Lane | None:
    """What runs the actions of a rank in order, ``action`` among them; None if nothing does."""
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
    schedule: Schedule, partners: Mapping[int, int], before: list[list[int]]
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
                if RULES[row[node - start].kind].lane is Lane.RECEIVE:
                    before[partners[node]] += previous
            previous = batch
        for node, action in enumerate(row, start=start):
            if RULES[action.kind].holds_up:
                for earlier in tuple(before[node]):
                    before[node] += together.get(earlier, ())
        start += len(row)
    return together
