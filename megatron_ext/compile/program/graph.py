"""Graph of the waits between the actions of a schedule with messages.

A schedule has an order of actions for each rank, and no times. An action also waits for other
ranks: a receive for its send, a collective for all its ranks. The proof, the simulation and the
insertion of waits all depend on what waits for what. The rules of the executor, NCCL and gloo are
therefore written down once, here, as edges of one graph (`build_graph`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_ext.compile.program.longest_paths import Precedence
from megatron_ext.compile.program.node_lists import NodeLists
from megatron_ext.schedule.action import Action, Kind, Slice
from megatron_ext.schedule.action_arrays import (
    IS_BLOCKING,
    IS_COLLECTIVE,
    IS_RECEIVE,
    IS_SEND,
    ActionArrays,
    Ints,
)
from megatron_ext.schedule.kinds import (
    HOST_LANES,
    RULES,
    Lane,
    Need,
    Rule,
    Source,
    Where,
)
from megatron_ext.schedule.placement import Neighbour, Placement
from megatron_ext.schedule.problem import P2P
from megatron_ext.schedule.schedule import Schedule


class Device(enum.Enum):
    """Models of how a GPU blocks: which actions of a rank block its next ones."""

    # Messages, collectives and copies run in parallel to passes and waits.
    PARALLEL = "passes and waits"
    WAITS_AT_PASSES = "passes and waits, which all that was posted before blocks too"
    # All actions run one after the other, as if the device had a single hardware queue or if every
    # host call waited for the device.
    ONE_QUEUE = "everything"


class Channel(NamedTuple):
    """The messages of one kind, ``send``, from rank ``sender`` to rank ``receiver``.

    The channel's k-th send meets its k-th receive. On a V both activations and gradients go from a
    rank to its neighbour, often not in the order in which the neighbour uses them; with separate
    channels, neither waits behind the other.
    """

    sender: int
    receiver: int
    send: Kind

    def __str__(self) -> str:
        return f"{self.send} {self.sender}>{self.receiver}"


def channel_of(action: Action, placement: Placement) -> Channel:
    """Return the channel of the message that ``action`` sends or receives."""
    other = partner_of(action, placement)
    here, there = placement.rank_of[action.stage], placement.rank_of[other.stage]
    if RULES[action.kind].lane is Lane.SEND:
        return Channel(here, there, action.kind)
    return Channel(there, here, other.kind)


def channels(schedule: Schedule) -> set[Channel]:
    """Return all channels (sender, receiver, kind of message) between the stages of ``schedule``.

    For an evaluation they include the channels that only training uses, because channels are
    created once, and training may follow. Channels of post-validation are not included: its
    messages go through host memory.
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
    """Return the action at the other end of a message: the receive for a send, and the reverse."""
    rule = RULES[action.kind]
    assert rule.partner is not None and rule.neighbour is not None
    other = placement.neighbour(action.stage, rule.neighbour)
    assert other is not None, f"{action} has no other end"
    return Action(other, rule.partner, action.microbatch)


def batches_of(row: Sequence[Action]) -> Iterator[range]:
    """Yield the positions in a rank's ``row`` of messages that move in one batch, batch after
    batch."""
    receives = 0  # number of receives that directly precede this position
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
    """Yield each dependency of ``action`` with its possible actions, one of which must come before
    ``action``."""
    for need in RULES[action.kind].needs:
        stage = _looked_for_on(need, action.stage, placement)
        part = slice_looked_for(need.slice, action.microbatch)
        if stage is not None and part is not None:
            yield need, [Action(stage, kind, part) for kind in need.kinds]


def slice_looked_for(which: Neighbour | None, microbatch: int) -> int | None:
    """Return the microbatch or slice of the action on which an action of ``microbatch`` depends.

    With ``which`` this is the next or previous slice of the sequence; None if there is none.
    """
    if which is None:
        return microbatch
    if not isinstance(microbatch, Slice) or not 0 <= microbatch.slice + which < microbatch.slices:
        return None
    return Slice(microbatch.microbatch, microbatch.slice + which, microbatch.ends)


def _looked_for_on(need: Need, stage: int, placement: Placement) -> int | None:
    """Return the stage of the action on which an action of ``stage`` depends; None if there is
    none."""
    if need.source is Source.SAME:
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
    return placement.shard_stage(end) if stage == end else None


_ENDS = {Source.FIRST: 0, Source.INPUT_SHARD: 0, Source.LAST: -1, Source.OUTPUT_SHARD: -1}


def has_place(
    kind: Kind,
    stage: int,
    placement: Placement,
    forward_only: bool = False,
    first_trained_stage: int = 0,
) -> bool:
    """Return whether actions of ``kind`` belong on ``stage``.

    Args:
        forward_only: whether the schedule is an evaluation's.
        first_trained_stage: the first stage with anything to train.
    """
    rule = RULES[kind]
    if forward_only and not rule.in_evaluation:
        return False
    if rule.neighbour is not None and not placement.is_remote(stage, rule.neighbour):
        return False
    if rule.where is Where.STAGE:
        return rule.in_evaluation or first_trained_stage <= _first_of(rule, stage, placement)
    if rule.where is Where.SHARD:
        return stage == placement.shard_stage(stage)
    if rule.where is Where.GIVER:
        (need,) = rule.needs
        return stage == placement.shard_stage(stage) and not _is_used(
            Action(stage, need.kinds[0], 0), placement, forward_only
        )
    if rule.where is Where.RANK:
        ends = [stage]
        if rule.is_message:
            ends.append(partner_of(Action(stage, kind, 0), placement).stage)
        return all(end == placement.shard_stage(end) for end in ends)
    return stage == placement.shard_stage(placement.last)


def _first_of(rule: Rule, stage: int, placement: Placement) -> int:
    """Return the first stage that an action concerns: its own, or the stage at a message's other
    end."""
    if rule.neighbour is None:
        return stage
    other = placement.neighbour(stage, rule.neighbour)
    assert other is not None
    return min(stage, other)


def _is_used(collective: Action, placement: Placement, forward_only: bool) -> bool:
    """Return whether a pass on this rank needs the result of the collective action."""
    return any(
        collective in choices
        for stage in placement.stages_of[placement.rank_of[collective.stage]]
        for kind, rule in RULES.items()
        if rule.lane is Lane.COMPUTE and has_place(kind, stage, placement, forward_only)
        for _, choices in needed(Action(stage, kind, 0), placement)
    )


class Needs(dict[tuple[int, Kind], list[tuple[int, Kind, Neighbour | None]]]):
    """For each stage and kind of action: stage, kind and slice of the actions that it may depend
    on.

    These dependencies (`needed`) are the same for every microbatch, so they are computed once. The
    slice is written as in `Need.slice`.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def __missing__(self, key: tuple[int, Kind]) -> list[tuple[int, Kind, Neighbour | None]]:
        stage, kind = key
        looked_for = [
            (need, _looked_for_on(need, stage, self.placement)) for need in RULES[kind].needs
        ]
        self[key] = [
            (there, needed_kind, need.slice)
            for need, there in looked_for
            if there is not None
            for needed_kind in need.kinds
        ]
        return self[key]


# A cache of few entries suffices, as the graphs of one schedule are made directly after one
# another.
_needs_on = lru_cache(maxsize=8)(Needs)


def needed_numbers(arrays: ActionArrays, placement: Placement) -> Iterator[Ints]:
    """Yield arrays with the numbers of the actions on which each action depends.

    The first array has the first dependency of each action, the second array its second, and so on;
    -1 if there is none.
    """
    needs, place = (
        _needs_on(placement),
        {stage_kind: at for at, stage_kind in enumerate(arrays.stage_kinds)},
    )
    is_cut = arrays.slices > 1
    wanted = [
        [
            (place[stage, kind], part or 0)
            for stage, kind, part in needs[stage_kind]
            if (stage, kind) in place and (is_cut or part is None)
        ]
        for stage_kind in arrays.stage_kinds
    ]
    for turn in range(max(map(len, wanted), default=0)):
        row = [row[turn] if turn < len(row) else (-1, 0) for row in wanted]
        pairs, shifts = np.array(row, dtype=np.int32).T
        yield arrays.of_stage_kinds(pairs, shifts if is_cut else None)


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph(Precedence):
    """Graph of what waits for what in a program; its nodes are the actions of all ranks.

    Attributes:
        actions: all actions of all ranks, rank after rank.
        ranks: the rank of each action.
        partners: for the node of a message, the node of its other end; -1 for other nodes.
        batches: for the node of a batched message, the nodes that move together.
        leaders: for the node of a collective, the one of its nodes that all its others wait for;
            other nodes are their own leaders.
    """

    actions: tuple[Action, ...]
    ranks: Ints
    partners: Ints
    batches: Mapping[int, Sequence[int]]
    leaders: Ints

    def cycle(self) -> list[Action]:
        """Return actions in a deadlock, each waiting for the next and the last for the first.

        The list is empty if there is no deadlock.
        """
        stuck = set(self.stuck)
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


class _Waits:
    """Collects which node waits for which while a graph of waits is built."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._later: list[Ints] = []
        self._earlier: list[Ints] = []

    def add(self, later: Ints, earlier: Ints) -> None:
        """Let each action of ``later`` wait for the action of ``earlier`` at the same position.

        An entry -1 of ``earlier`` stands for no action.
        """
        is_there = earlier >= 0
        self._later.append(later[is_there])
        self._earlier.append(earlier[is_there])

    @property
    def before(self) -> NodeLists:
        """For each node, the nodes that it waits for, in the order in which they were added."""
        later, earlier = np.concatenate(self._later), np.concatenate(self._earlier)
        return NodeLists.of(later, earlier, self._nodes)


def build_graph(
    schedule: Schedule,
    p2p: P2P = P2P.ASYNC,
    device: Device = Device.PARALLEL,
    known_order: Ints | None = None,
) -> Graph:
    """Return the graph of waits of ``schedule``, which must be complete: with messages and waits.

    - A rank issues its actions in order, and compute and waits block its later actions.
    - A channel processes its sends in order, and its receives.
    - A message moves when both its send and its receive have been issued (rendezvous).
    - An action starts when its dependencies are done.
    - A collective ends on all ranks together, once all have issued it.
    - Copies to the host follow one another, and so do copies from it.
    - Two overlapped passes begin together and end together.

    These rules are those of a device whose streams run in parallel. Other devices (`Device`)
    guarantee no parallel streams, or have calls of the host that wait for everything that has been
    posted.
    """
    placement, arrays = schedule.placement, schedule.arrays
    waits, nodes = _Waits(len(arrays)), arrays.numbers
    blockers = blocking_actions(arrays, device)
    waits.add(nodes, blockers)
    if device is not Device.ONE_QUEUE:
        # On a device with a single queue the dependencies below hold already, since the needed
        # action comes earlier in the row.
        waits.add(nodes, _before_in_queue(arrays, placement))
        if device is Device.WAITS_AT_PASSES:
            waits.add(*_waited_for_at_passes(arrays))
        for earlier in needed_numbers(arrays, placement):
            waits.add(nodes, earlier)
            # Two overlapped passes begin once the needs of both passes are fulfilled.
            waits.add(schedule.paired, earlier[schedule.paired + 1])
    partners = partners_of(arrays, placement)
    sends, receives = (nodes[flags[arrays.kind]] for flags in (IS_SEND, IS_RECEIVE))
    waits.add(receives, partners[receives])
    waits.add(sends, blockers[partners[sends]])
    batches = _move_in_batches(schedule, partners, waits) if p2p is P2P.BATCHED else {}
    leaders = _move_together(arrays, waits)
    return Graph(
        before=waits.before,
        known_order=known_order,
        actions=tuple(chain.from_iterable(schedule.rows)),
        ranks=arrays.rank,
        partners=partners,
        batches=batches,
        leaders=leaders,
    )


def blocking_actions(arrays: ActionArrays, device: Device = Device.PARALLEL) -> Ints:
    """Return, for each action, the last action before it on its rank that blocks it; else -1."""
    before = arrays.numbers - 1
    if device is not Device.ONE_QUEUE:
        before = np.append(np.int32(-1), arrays.latest(IS_BLOCKING[arrays.kind]))[:-1]
    return np.where(before < arrays.first, np.int32(-1), before)


def _waited_for_at_passes(arrays: ActionArrays) -> tuple[Ints, Ints]:
    """Return pairs of actions: a blocking action, and one posted since the previous blocking
    action.

    The two arrays have the numbers of the former and of the latter.
    """
    is_blocking = IS_BLOCKING[arrays.kind]
    posted, held = arrays.numbers[~is_blocking], arrays.numbers[is_blocking]
    next_held = np.append(held, np.int32(len(arrays)))[np.searchsorted(held, posted)]
    rank = np.append(arrays.rank, np.int32(-1))
    is_of_row = rank[next_held] == arrays.rank[posted]
    return next_held[is_of_row], posted[is_of_row]


def _before_in_queue(arrays: ActionArrays, placement: Placement) -> Ints:
    """Return, for each action, the previous action in its communication queue (`_queue`); else
    -1."""
    queues: dict[tuple[int, Channel | Kind | Lane | None], int] = {}
    of_pairs = []
    for stage, kind in arrays.stage_kinds:
        queue = _queue(Action(stage, kind, 0), placement)
        which = placement.rank_of[stage], queue
        of_pairs.append(-1 if queue is None else queues.setdefault(which, len(queues)))
    queue_of = np.array(of_pairs, dtype=np.int32)[arrays.stage_kind]
    queued = arrays.numbers[queue_of >= 0]
    queued = queued[np.argsort(queue_of[queued], kind="stable")]
    before = np.full(len(arrays), -1, dtype=np.int32)
    is_next = queue_of[queued[1:]] == queue_of[queued[:-1]]
    before[queued[1:][is_next]] = queued[:-1][is_next]
    return before


def _queue(action: Action, placement: Placement) -> Channel | Kind | Lane | None:
    """Return the queue in which a rank runs communication or copies in order; None for passes."""
    rule = RULES[action.kind]
    if rule.is_message:
        return channel_of(action, placement)
    if rule.lane is Lane.COLLECTIVE:
        return action.kind
    return rule.lane if rule.lane in HOST_LANES else None


def partners_of(arrays: ActionArrays, placement: Placement) -> Ints:
    """Return, for each action that is a message, the number of its other end; else -1."""
    place = {stage_kind: at for at, stage_kind in enumerate(arrays.stage_kinds)}
    others = [-1] * len(place)
    for (stage, kind), at in place.items():
        if RULES[kind].is_message:
            others[at] = place[partner_of(Action(stage, kind, 0), placement)[:2]]
    return arrays.of_stage_kinds(np.array(others, dtype=np.int32))


def _move_together(arrays: ActionArrays, waits: _Waits) -> Ints:
    """Add to ``waits`` that a collective ends on all ranks at the same time; return the leaders.

    The leader of a collective is the one of its nodes for which the others wait (`Graph.leaders`).
    """
    leaders = arrays.numbers.copy()
    nodes = arrays.numbers[IS_COLLECTIVE[arrays.kind]]
    if not len(nodes):
        return leaders
    calls = arrays.microbatch[nodes].astype(np.int64) * len(RULES) + arrays.kind[nodes]
    _, first, call = np.unique(calls, return_index=True, return_inverse=True)
    leaders[nodes] = nodes[first[call]]
    before = waits.before
    leader = leaders[before.owners]
    follows = leader != before.owners
    waits.add(leader[follows], before.nodes[follows])
    followers = nodes[leaders[nodes] != nodes]
    waits.add(followers, leaders[followers])
    return leaders


def _move_in_batches(schedule: Schedule, partners: Ints, waits: _Waits) -> dict[int, Sequence[int]]:
    """Add to ``waits`` the waits that one shared communicator causes; return `Graph.batches`.

    The communicator of batched messages (`P2P.BATCHED`) runs its messages in order:

    - A send moves together with the receives directly before it, every other receive alone.
    - A rank's batches move one after the other, so a message waits for the previous batch at either
      end.
    - A message has arrived when all of its batch has.
    """
    together: dict[int, Sequence[int]] = {}
    pairs: list[tuple[int, int]] = []
    start = 0
    for row in schedule.rows:
        previous: Sequence[int] = ()
        for positions in batches_of(row):
            batch = range(start + positions.start, start + positions.stop)
            for node in batch:
                together[node] = batch
                pairs += [(node, earlier) for earlier in previous]
                if RULES[row[node - start].kind].lane is Lane.RECEIVE:
                    pairs += [(int(partners[node]), earlier) for earlier in previous]
            previous = batch
        start += len(row)
    before = waits.before
    ends_batch = IS_BLOCKING[schedule.arrays.kind[before.owners]]
    for node, message in zip(
        before.owners[ends_batch].tolist(), before.nodes[ends_batch].tolist(), strict=True
    ):
        pairs += [(node, other) for other in together.get(message, ())]
    later, earlier = np.array(pairs, dtype=np.int32).reshape(-1, 2).T
    waits.add(later, earlier)
    return together
