"""Order and waits of messages under Megatron's own pipeline functions.

A rank runs its program in order: passes, posts of messages, waits for messages. A wait blocks
everything after it, on the host or on the compute stream. A message moves when both its ends have
been posted, each after all that blocks its rank by then::

    1F1B         F, post and await {send F, receive B}, B, post and await {send B, receive F}
    interleaved  F, post {send F, receive F}, await send F, await receive B,
                 B, post {send B, receive B}, await the last send B, await receive F

That is `forward_backward_pipelining_without_interleaving`, and `..._with_interleaving` between
warm-up and flush, where both end with a wait for all that was posted. Messages that overlap passes
are posted one by one, and NCCL has one communicator for each two ranks: their messages follow one
another. (Two ranks alone have one for each direction.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import numpy as np

from megatron_ext.compile.program.graph import Graph, has_place, partner_of, partners_of
from megatron_ext.compile.program.node_lists import NodeLists
from megatron_ext.compile.program.pass_graph import PassGraph
from megatron_ext.compile.program.waits import wait_of
from megatron_ext.schedule.action import Action, Kind, OverlappedPasses
from megatron_ext.schedule.action_arrays import IS_PASS, IS_SEND
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.stock_executor import StockExecutor


def as_stock_runs(schedule: Schedule, executor: StockExecutor) -> tuple[Schedule, Graph] | None:
    """Return ``schedule`` with messages and waits as Megatron's own pipeline functions have them.

    The second result is the graph of waits. Return None if Megatron's loops cannot run the
    schedule's order of passes, for one of three reasons. The microbatches of a group (those that go
    through a chunk before the next chunk) are fewer than the ranks. Or overlapping passes has
    changed the order. Or the ranks would wait for each other: overlapping gains nothing on a stage
    without experts, so that its rank has one forward pass fewer in its warm-up than the others, and
    under Megatron all ranks have the additional one.
    """
    placement, rows = schedule.placement, schedule.compute_rows
    if placement.chunks > 1 and _smallest_group(rows[0], placement) < placement.ranks:
        return None
    programs = [_Program() for _ in rows]
    passes = [_Passes.of(rank, rows, schedule) for rank in range(len(rows))]
    for program, of_rank in zip(programs, passes, strict=True):
        if placement.chunks == 1:
            _without_virtual_stages(program, of_rank)
        else:
            _interleaved(program, of_rank, executor)
    made = replace(schedule, rows=tuple(tuple(program.actions) for program in programs))
    if made.compute_rows != rows:
        assert schedule.pairs, f"{schedule.name} has not stock's order of passes"
        return None
    is_alone = placement.chunks > 1 and executor.overlaps
    graph = _graph(made, programs, are_posted_alone=is_alone)
    if schedule.pairs and graph.stuck:
        return None
    return made, graph


def stock_pass_graph(schedule: Schedule, costs: Costs, executor: StockExecutor) -> PassGraph | None:
    """Return the graph of the passes of ``schedule`` as Megatron's own pipeline functions run them.

    Messages and waits are further nodes, which take no time themselves. Return None as
    `as_stock_runs` does.
    """
    run = as_stock_runs(schedule, executor)
    if run is None:
        return None
    made, graph = run
    arrays = made.arrays
    is_second = np.zeros(len(arrays), dtype=bool)
    is_second[made.paired + 1] = True
    nodes = (np.cumsum(~is_second) - 1).astype(np.int32)
    p2p_seconds = np.array(
        [
            costs.of(action) if RULES[action.kind].lane is Lane.SEND else 0.0
            for row in arrays.examples
            for action in row
        ]
    )[arrays.stage_kind]
    later, earlier = nodes[graph.before.owners], nodes[graph.before.nodes]
    waits = later != earlier  # the second of two overlapped passes does not wait for the first
    before = NodeLists.of(later[waits], earlier[waits], int(nodes[-1]) + 1)
    lags = p2p_seconds[graph.before.nodes][waits]
    order = np.argsort(later[waits], kind="stable")
    return PassGraph(before=before, nodes=nodes[IS_PASS[arrays.kind]], lags=lags[order])


@dataclass(frozen=True)
class _Program:
    """Program of one rank under construction, as Megatron's pipeline functions run it.

    Actions are named by their position in the program.

    Attributes:
        actions: passes, messages and waits, in order.
        waits: for each action, the actions of the rank that block it.
        posts: sends and receives, as they are posted.
    """

    actions: list[Action] = field(default_factory=list)
    waits: list[tuple[int, ...]] = field(default_factory=list)
    posts: dict[Action, int] = field(default_factory=dict)
    # Nodes of the graph that the rank's next action waits for.
    _holding: list[int] = field(default_factory=list)

    def run(self, *passes: Action) -> None:
        """Add a pass, or two overlapped passes, to the rank's program."""
        for one in passes:
            place = self._add(one)
            self._holding[:] = [place]

    def post(self, *messages: Action | None) -> None:
        """Add posts of ``messages`` without waiting for any; None stands for no message."""
        for message in messages:
            if message is not None:
                self.posts[message] = self._add(message)

    def wait(self, *messages: Action | None) -> None:
        """Add waits for ``messages`` that are posted already; None stands for no message."""
        for message in messages:
            if message is None:
                continue
            self._holding.append(self.posts[message])
            if RULES[message.kind].lane is Lane.SEND:
                place = self._add(wait_of(message))
                self._holding[:] = [place]

    def exchange(self, *messages: Action | None) -> None:
        """Add posts of ``messages`` that move together, and waits for all of them."""
        self.post(*messages)
        self.wait(*messages)

    def _add(self, action: Action) -> int:
        self.actions.append(action)
        self.waits.append(tuple(self._holding))
        return len(self.actions) - 1


@dataclass(frozen=True)
class _Passes:
    """Passes of a rank as Megatron's pipeline functions count them.

    Attributes:
        forwards, backwards: the rank's forward and backward passes, in order.
        around: the last rank's forward passes and the first rank's backward passes, whose outputs
            go around the loop of an interleaved schedule to the other end.
        warmup: number of forward passes before the first that a backward pass follows.
        pairs: forward and backward passes that run as one.
    """

    placement: Placement
    rank: int
    forwards: tuple[Action, ...]
    backwards: tuple[Action, ...]
    around: tuple[tuple[Action, ...], tuple[Action, ...]]
    warmup: int
    pairs: frozenset[OverlappedPasses]

    @classmethod
    def of(cls, rank: int, rows: Sequence[Sequence[Action]], schedule: Schedule) -> _Passes:
        last = len(rows) - 1
        forwards, backwards = _parted(rows[rank])
        warmup = rows[rank].index(backwards[0]) - 1
        if _full_warmup(rank, forwards, schedule.placement) >= len(forwards):
            # All forward passes of this rank are warm-up, so Megatron runs no forward pass together
            # with a backward pass.
            warmup = len(forwards)
        return cls(
            schedule.placement,
            rank,
            forwards,
            backwards,
            (_parted(rows[last])[0], _parted(rows[0])[1]),
            warmup,
            schedule.pairs,
        )

    @property
    def remaining(self) -> int:
        """Number of the rank's forward passes that are followed by a backward pass."""
        return len(self.forwards) - self.warmup

    def sent(self, one: Action) -> Action | None:
        """Return the send of the tensor that the pass ``one`` makes; None if nothing is sent."""
        return self._message(one, Kind.SEND_F if one.kind is Kind.FORWARD else Kind.SEND_B)

    def received(self, one: Action) -> Action | None:
        """Return the receive of the tensor that a pass takes as input; None if nothing is
        received."""
        return self._message(one, Kind.RECV_F if one.kind is Kind.FORWARD else Kind.RECV_B)

    def _message(self, one: Action, kind: Kind) -> Action | None:
        is_sent = has_place(kind, one.stage, self.placement)
        return one._replace(kind=kind) if is_sent else None

    def next_input(self, number: int) -> Action | None:
        """Return the receive of an input that is posted with forward pass ``number``, or None.

        This is the input of the next forward pass. The first rank receives instead what the last
        rank has made by then (`recv_tensor_from_previous_stage`).
        """
        return self._next(number, self.forwards, self.around[0], is_leading=self.rank == 0)

    def next_gradient(self, number: int) -> Action | None:
        """Return the receive of a gradient that is posted with backward pass ``number``, or None.

        The rule is that of `next_input`.
        """
        is_last = self.rank == self.placement.ranks - 1
        return self._next(number, self.backwards, self.around[1], is_leading=is_last)

    def _next(
        self,
        number: int,
        passes: Sequence[Action],
        around: Sequence[Action],
        *,
        is_leading: bool,
    ) -> Action | None:
        if number == len(passes) - 1:
            return None
        if not is_leading:
            return self.received(passes[number + 1])
        made = number - (self.placement.ranks - 1)
        sent = None if made < 0 else self.sent(around[made])
        return None if sent is None else partner_of(sent, self.placement)


def _parted(row: Sequence[Action]) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """Return the forward passes and the backward passes of a rank's ``row``."""
    forwards = tuple(action for action in row if action.kind is Kind.FORWARD)
    return forwards, tuple(action for action in row if action.kind is not Kind.FORWARD)


def _full_warmup(rank: int, forwards: Sequence[Action], placement: Placement) -> int:
    """Return the number of warm-up forward passes in Megatron's `get_pp_rank_microbatches`.

    A warm-up forward pass is not followed directly by a backward pass. The step may have fewer
    forward passes.
    """
    ahead, chunks = placement.ranks - 1 - rank, placement.chunks
    if chunks == 1:
        return ahead
    return 2 * ahead + (chunks - 1) * _group(forwards)


def _group(forwards: Sequence[Action]) -> int:
    """Return how many microbatches go through a model chunk before the next chunk's turn."""
    first = forwards[0].stage
    return next((n for n, one in enumerate(forwards) if one.stage != first), len(forwards))


def _smallest_group(row: Sequence[Action], placement: Placement) -> int:
    """Return how many microbatches go through a chunk in turn, in the smallest such group.

    That is the last group if it is incomplete, else any group.
    """
    forwards, _ = _parted(row)
    group = _group(forwards)
    return len(forwards) // placement.chunks % group or group


def _without_virtual_stages(program: _Program, passes: _Passes) -> None:
    forwards, backwards, warmup = passes.forwards, passes.backwards, passes.warmup
    received, sent = passes.received, passes.sent
    for forward in forwards[:warmup]:
        program.exchange(received(forward))
        program.run(forward)
        program.exchange(sent(forward))
    for number, forward in enumerate(forwards[warmup:]):
        if not number:
            program.exchange(received(forward))
        backward = backwards[number]
        program.run(forward)
        program.exchange(sent(forward), received(backward))
        program.run(backward)
        following = forwards[warmup + number + 1 :][:1]
        program.exchange(sent(backward), *map(received, following))
    for backward in backwards[passes.remaining :]:
        program.exchange(received(backward))
        program.run(backward)
        program.exchange(sent(backward))


def _interleaved(program: _Program, passes: _Passes, executor: StockExecutor) -> None:
    program.exchange(passes.received(passes.forwards[0]))
    _warm_up(program, passes, executor)
    if executor.overlaps:
        last_send = _steady(program, passes)
    else:
        last_send = None
        for number in range(passes.remaining):
            ahead = passes.warmup + number
            forward, backward = passes.forwards[ahead], passes.backwards[number]
            program.run(forward, backward)
            program.exchange(
                passes.sent(forward),
                passes.next_input(ahead),
                passes.sent(backward),
                passes.next_gradient(number),
            )
    _flush(program, passes, executor, last_send)


def _warm_up(program: _Program, passes: _Passes, executor: StockExecutor) -> None:
    first_gradient = passes.received(passes.backwards[0]) if passes.remaining else None
    for number in range(passes.warmup):
        forward = passes.forwards[number]
        sent, following = passes.sent(forward), passes.next_input(number)
        if not executor.overlaps_ends:
            program.run(forward)
            is_last = number == passes.warmup - 1 and not executor.overlaps
            program.exchange(sent, following, first_gradient if is_last else None)
            continue
        if number:
            program.wait(passes.received(forward))
        if passes.rank:
            program.post(following)
        program.run(forward)
        program.post(sent)
        if not passes.rank:
            program.post(following)
        program.wait(sent)
    if executor.overlaps:
        program.post(first_gradient)


def _steady(program: _Program, passes: _Passes) -> Action | None:
    """Add the passes of Megatron's interleaved steady state; return the send not waited for yet."""
    last_gradient: Action | None = None
    for number in range(passes.remaining):
        ahead = passes.warmup + number
        forward, backward = passes.forwards[ahead], passes.backwards[number]
        output, gradient = passes.sent(forward), passes.sent(backward)
        is_overlapped = OverlappedPasses(forward, backward) in passes.pairs
        program.wait(passes.received(forward))
        if is_overlapped:
            program.wait(passes.received(backward))
            program.run(forward, backward)
        else:
            program.run(forward)
        program.post(output, passes.next_input(ahead))
        program.wait(output)
        if not is_overlapped:
            program.wait(passes.received(backward))
            program.run(backward)
        program.post(gradient, passes.next_gradient(number))
        program.wait(last_gradient)
        last_gradient = gradient
    return last_gradient


def _flush(
    program: _Program, passes: _Passes, executor: StockExecutor, last_send: Action | None
) -> None:
    if not passes.remaining:
        program.exchange(passes.received(passes.backwards[0]))
    is_last = passes.rank == passes.placement.ranks - 1
    for number in range(passes.remaining, len(passes.backwards)):
        backward = passes.backwards[number]
        sent, following = passes.sent(backward), passes.next_gradient(number)
        program.wait(passes.received(backward))
        if not executor.overlaps_ends:
            program.run(backward)
            program.exchange(sent, following)
            continue
        if not is_last:
            program.post(following)
        program.run(backward)
        program.post(sent)
        if is_last:
            program.post(following)
        program.wait(last_send)
        last_send = sent
    program.wait(last_send)


def _graph(schedule: Schedule, programs: Sequence[_Program], *, are_posted_alone: bool) -> Graph:
    """Return the graph of waits of ``schedule``, given the ``programs`` of its ranks.

    ``are_posted_alone``: messages are posted one by one, so those between two ranks follow each
    other.
    """
    arrays, placement = schedule.arrays, schedule.placement
    first = [*map(int, np.cumsum([0, *(len(program.actions) for program in programs)]))]
    partners = partners_of(arrays, placement)
    is_send = IS_SEND[arrays.kind]
    later: list[int] = []
    earlier: list[int] = []

    def add(node: int, others: Iterable[int]) -> None:
        for other in others:
            later.append(node)
            earlier.append(other)

    queues: dict[Hashable, list[int]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for place, (action, waits) in enumerate(zip(program.actions, program.waits, strict=True)):
            node = first[rank] + place
            held_by = [first[rank] + other for other in waits]
            add(node, held_by)
            rule = RULES[action.kind]
            if rule.lane is Lane.RECEIVE:
                partner = int(partners[node])
                add(partner, held_by)
                add(node, [partner])
            if rule.is_message and are_posted_alone:
                other = placement.rank_of[partner_of(action, placement).stage]
                two = (rank, other) if rule.lane is Lane.SEND else (other, rank)
                queue = two if placement.ranks == 2 else frozenset(two)
                queues[rank, queue].append(node)
    for nodes in queues.values():
        for previous, node in pairwise(nodes):
            # In this graph a send's node is the moment when the message is sent, and its receive
            # ends at the same time.
            add(node if is_send[node] else int(partners[node]), [previous])
    before = NodeLists.of(
        np.array(later, dtype=np.int32), np.array(earlier, dtype=np.int32), len(arrays)
    )
    return Graph(
        before=before,
        actions=tuple(chain.from_iterable(schedule.rows)),
        ranks=arrays.rank,
        partners=partners,
        batches={},
        leaders=arrays.numbers,
    )
