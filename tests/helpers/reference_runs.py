"""A second check of schedules: an independent simulation of ranks that run a schedule in
parallel."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.problem import P2P, Offload, Problem, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule
from tests.helpers.schedules import RECEIVES, SENDS, B, F, I, W


@dataclass(frozen=True)
class Run:
    """How a schedule ran: when each action began and ended, or what went wrong."""

    times: Mapping[Action, tuple[float, float]]
    # The action at which each stuck rank waits, and the messages that never moved.
    stuck: tuple[Action, ...] = ()
    fault: str = ""  # description of an action that a rank could not do, or that was never done

    @property
    def ended_well(self) -> bool:
        return not self.stuck and not self.fault


class _Fault(Exception):
    pass


def runs_to_end(schedule: Schedule, problem: Problem) -> bool:
    """Return whether every rank comes to the end of its row with all work of ``problem`` done."""
    return run(schedule, problem).ended_well


def run(schedule: Schedule, problem: Problem, held_up: bool = False) -> Run:
    """Run ``schedule`` on ranks in parallel, by the meaning of its text and not by its proof.

    This function uses neither the table of kinds nor the graph, so that it can check both. A rank
    runs the actions of its row. It stops at a pass whose message has not arrived and at a wait
    whose send has not moved. Sends and receives are started and run by themselves. From one rank to
    another, activations and gradients have a channel each. On a channel, the k-th send meets the
    k-th receive once both have been started and the message before them has moved. The k-th
    collective of a kind ends on all ranks together, once all have started it. With batched
    messages, a rank has one batch under way at a time, and none of its messages arrives before all
    have. A pass without its input, and a message that meets the receive of another, are faults.

    ``held_up``: everything that a rank has started must end before it does anything else; with
    batched messages, before it does anything except start messages.
    """
    ranks = _BatchedRanks if problem.options.p2p is P2P.BATCHED else _Ranks
    return ranks(schedule, problem, held_up).run()


class _Ranks:
    def __init__(self, schedule: Schedule, problem: Problem, held_up: bool) -> None:
        self.schedule = schedule
        self.problem = problem
        self.held_up = held_up
        self.rank_of = schedule.placement.rank_of
        self.times: dict[Action, tuple[float, float]] = {}
        # Times from which received messages may be used, or sent tensors may be freed.
        self.there: dict[Action, float] = {}
        self.started: dict[Action, float] = {}  # start times of messages
        self.sends: dict[tuple[int, int, bool], list[Action]] = defaultdict(list)
        self.receives: dict[tuple[int, int, bool], list[Action]] = defaultdict(list)
        self.moved: dict[tuple[int, int, bool], int] = defaultdict(int)
        self.calls: dict[Kind, list[list[Action]]] = {k: [[] for _ in schedule.rows] for k in MADE}
        # number of collectives of each kind that all ranks have run
        self.called: dict[Kind, int] = defaultdict(int)
        self.first = [self.rank_of.index(rank) for rank in range(len(schedule.rows))]
        self.free = [0.0 for _ in schedule.rows]
        # place of the output of each pass: here, leaving or gone
        self.where: dict[Action, str] = {}
        # time when a rank's link to the host is free in a direction
        self.copied: dict[tuple[int, str], float] = {}

    def run(self) -> Run:
        at = [0 for _ in self.schedule.rows]
        try:
            moving = True
            while moving:
                moving = False
                for rank, row in enumerate(self.schedule.rows):
                    while at[rank] < len(row) and self.is_free_for(row[at[rank]], row[: at[rank]]):
                        if not self.step(rank, row[at[rank]]):
                            break
                        at[rank] += 1
                        moving = True
                moving = self.move_messages() or moving
                moving = self.call_together() or moving
            rows = zip(at, self.schedule.rows, strict=True)
            standing = [row[reached] for reached, row in rows if reached < len(row)]
            standing += [action for action in self.started if action not in self.times]
            if not standing:
                self.check_all_done()
        except _Fault as fault:
            return Run(self.times, fault=str(fault))
        return Run(self.times, stuck=tuple(standing))

    def is_free_for(self, action: Action, before: Sequence[Action]) -> bool:
        """Return whether a rank that has started the actions ``before``, and no others, may start
        ``action``."""
        return not self.held_up or not before or before[-1] in self.times

    def step(self, rank: int, action: Action) -> bool:
        """Run ``action`` of ``rank`` if that is possible now, and return whether it ran."""
        stage, kind, microbatch = action
        if not 0 <= stage < len(self.rank_of) or self.rank_of[stage] != rank:
            raise _Fault(f"{action}: rank {rank} does not hold stage {stage}")
        if action in self.times or action in self.started:
            raise _Fault(f"{action} occurs twice")
        if kind in (*SENDS, *RECEIVES):
            self.start_message(rank, action)
            return True
        if kind in MADE:
            self.start_collective(rank, action)
            return True
        if kind in (Kind.WAIT_F, Kind.WAIT_B):
            send = Action(stage, Kind.SEND_F if kind is Kind.WAIT_F else Kind.SEND_B, microbatch)
            return self.finish(rank, action, send)
        do = self.do_pass
        if kind in GIVEN:
            do = self.wait_given
        elif kind in BROUGHT:
            do = self.do_vocabulary_pass
        elif kind in COPIES:
            do = self.do_copy
        return do(rank, action)

    def do_pass(self, rank: int, action: Action) -> bool:
        stage, kind, microbatch = action
        backward = [Action(stage, half, microbatch) for half in (I, B)]
        if kind is W:
            if backward[0] not in self.times:
                raise _Fault(f"{action} runs before the input gradient of its microbatch")
            return self.finish(rank, action, None)
        if kind is F:
            neighbour, message = stage - 1, Kind.RECV_F
            makers = [Action(neighbour, F, microbatch)]
        else:
            neighbour, message = stage + 1, Kind.RECV_B
            makers = [Action(neighbour, half, microbatch) for half in (I, B)]
            if Action(stage, F, microbatch) not in self.times:
                raise _Fault(f"{action} runs before the forward pass of its microbatch")
            if any(other in self.times for other in backward):
                raise _Fault(f"{action}: an earlier backward pass has used up the activations")
        if not 0 <= neighbour < len(self.rank_of):
            return self.do_pass_at_an_end(rank, action)
        if self.rank_of[neighbour] != rank:
            return self.finish(rank, action, Action(stage, message, microbatch))
        if not any(maker in self.times for maker in makers):
            raise _Fault(f"{action} runs before stage {neighbour} has made its input")
        return self.finish(rank, action, None)

    def do_pass_at_an_end(self, rank: int, action: Action) -> bool:
        """Run F of the first stage, or I or B of the last."""
        _, kind, microbatch = action
        if self.problem.options.vocab_parallel is VocabularyParallel.NONE:
            return self.finish(rank, action, None)
        brought = Kind.REDUCE_E if kind is F else Kind.REDUCE_SI
        if kind is not F and Action(self.first[rank], Kind.LOSS, microbatch) not in self.times:
            raise _Fault(f"{action} runs before this rank has the gradient of the loss")
        return self.finish(rank, action, Action(self.first[rank], brought, microbatch))

    def finish(self, rank: int, action: Action, message: Action | None) -> bool:
        """Run ``action`` once ``message`` has arrived, and return whether it ran."""
        if message is not None and message not in self.there:
            return False
        start = max(self.free[rank], self.there[message] if message else 0.0)
        stage, kind, microbatch = action
        if kind in COPIED_BACK:
            copy, maker = COPIED_BACK[kind]
            if self.where.get(Action(stage, maker, microbatch), "here") != "here":
                raise _Fault(f"{action}: a tensor that this pass reads is still on the host")
            start = max(start, self.there.get(Action(stage, copy, microbatch), 0.0))
        self.free[rank] = start + self.seconds(action)
        self.times[action] = (start, self.free[rank])
        return True

    def do_copy(self, rank: int, action: Action) -> bool:
        stage, kind, microbatch = action
        maker, before, after = COPIES[kind]
        what = Action(stage, maker, microbatch)
        if self.problem.options.activation_offload is Offload.NONE or what not in self.times:
            raise _Fault(
                f"{action}: the tensor to copy has not been made, or the schedule has no offload"
            )
        if any(Action(stage, user, microbatch) in self.times for user in USERS[maker]):
            raise _Fault(
                f"{action}: the tensor to copy has already been used up by a backward pass"
            )
        if self.where.get(what, "here") != before:
            raise _Fault(f"{action}: the tensor to copy is not {before} before this action")
        self.where[what] = after
        if before == "leaving":
            offload = {F: Kind.OFFLOAD_F, I: Kind.OFFLOAD_I}[maker]
            return self.finish(rank, action, Action(stage, offload, microbatch))
        lane = rank, before
        start = max(self.free[rank], self.copied.get(lane, 0.0))
        self.times[action] = start, start + self.problem.costs.of(action)
        self.there[action] = self.copied[lane] = self.times[action][1]
        return True

    def do_vocabulary_pass(self, rank: int, action: Action) -> bool:
        stage, kind, microbatch = action
        self.check_vocabulary(rank, action)
        if kind is Kind.LOSS and rank != self.rank_of[-1]:
            raise _Fault(f"{action}: only the last stage's rank has the labels for a loss")
        before = {Kind.LOGITS_WEIGHT: Kind.LOGITS_INPUT, Kind.EMBEDDING_WEIGHT: Kind.EMBEDDING}
        if kind in before and Action(stage, before[kind], microbatch) not in self.times:
            raise _Fault(f"{action} runs before {before[kind]} of its microbatch")
        return self.finish(rank, action, Action(stage, BROUGHT[kind], microbatch))

    def wait_given(self, rank: int, action: Action) -> bool:
        self.check_vocabulary(rank, action)
        if GIVEN[action.kind] not in self.only_given(rank):
            raise _Fault(
                f"{action}: this rank uses the collective's result, so the using pass waits for it"
            )
        return self.finish(rank, action, action._replace(kind=GIVEN[action.kind]))

    def only_given(self, rank: int) -> set[Kind]:
        """Return the kinds of collectives to which ``rank`` contributes a tensor, and whose result
        it does not use."""
        given = set()
        if rank != self.rank_of[0]:
            given.add(Kind.REDUCE_E)
        if rank != self.rank_of[-1]:
            given.add(Kind.GATHER_S if self.problem.forward_only else Kind.REDUCE_SI)
        return given

    def check_vocabulary(self, rank: int, action: Action) -> None:
        if self.problem.options.vocab_parallel is VocabularyParallel.NONE:
            raise _Fault(f"{action}: without vocabulary parallelism no rank has a shard")
        if action.stage != self.first[rank]:
            raise _Fault(f"{action}: the shard of rank {rank} belongs to stage {self.first[rank]}")

    def start_collective(self, rank: int, action: Action) -> None:
        stage, kind, microbatch = action
        self.check_vocabulary(rank, action)
        end, makers = MADE[kind]
        maker_stage = stage if end is None else end % len(self.rank_of)
        if kind is Kind.BCAST_SW:
            maker_stage = stage
        gives = end is None or self.rank_of[end] == rank
        made = [Action(maker_stage, maker, microbatch) in self.times for maker in makers]
        if gives and makers and not any(made):
            raise _Fault(f"{action}: the tensor for this collective has not been made")
        self.started[action] = self.free[rank]
        self.calls[kind][rank].append(action)

    def call_together(self) -> bool:
        moving = False
        for kind, rows in self.calls.items():
            while self.called[kind] < min(map(len, rows)):
                together = [row[self.called[kind]] for row in rows]
                if len({action.microbatch for action in together}) > 1:
                    raise _Fault(
                        f"{together[0]}: another rank calls this collective for another microbatch"
                    )
                before = [row[self.called[kind] - 1] for row in rows] if self.called[kind] else []
                start = max(self.started[action] for action in together)
                start = max([start, *(self.times[action][1] for action in before)])
                end = start + self.problem.costs.links.p2p_seconds
                for action in together:
                    self.times[action], self.there[action] = (start, end), end
                self.called[kind] += 1
                moving = True
        return moving

    def start_message(self, rank: int, action: Action) -> None:
        stage, kind, microbatch = action
        other = stage + (1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1)
        if not 0 <= other < len(self.rank_of) or self.rank_of[other] == rank:
            raise _Fault(f"{action}: the stage at the other end is missing, or on the same rank")
        there = self.rank_of[other]
        self.started[action] = self.free[rank]
        if kind in (Kind.RECV_F, Kind.RECV_B):
            self.receives[there, rank, kind is Kind.RECV_F].append(action)
            return
        makers: list[Kind] = [F] if kind is Kind.SEND_F else [I, B]
        if not any(Action(stage, maker, microbatch) in self.times for maker in makers):
            raise _Fault(f"{action}: the pass that makes the message has not run")
        self.sends[rank, there, kind is Kind.SEND_F].append(action)

    def move_messages(self) -> bool:
        moving = False
        for channel, sends in self.sends.items():
            receives = self.receives[channel]
            while self.moved[channel] < min(len(sends), len(receives)):
                count = self.moved[channel]
                send, receive = sends[count], receives[count]
                before = self.times[sends[count - 1]][1] if count else 0.0
                start = max(self.started[send], self.started[receive], before)
                self.there[send] = self.there[receive] = self.move(send, receive, start)
                self.moved[channel] += 1
                moving = True
        return moving

    def move(self, send: Action, receive: Action, start: float) -> float:
        """Let ``send`` meet ``receive``, and return the time at which the message arrives."""
        if send.kind is Kind.SEND_F:
            meant = Action(send.stage + 1, Kind.RECV_F, send.microbatch)
        else:
            meant = Action(send.stage - 1, Kind.RECV_B, send.microbatch)
        if receive != meant:
            raise _Fault(f"the message of {send} arrives at {receive}")
        end = start + self.seconds(send)
        self.times[send], self.times[receive] = (start, end), (end, end)
        return end

    def seconds(self, action: Action) -> float:
        stage, kind, _ = action
        if kind in (Kind.SEND_F, Kind.SEND_B):
            return self.problem.costs.links.p2p_seconds
        seconds = self.problem.costs.seconds
        if kind is B:
            return seconds[I][stage] + seconds[W][stage]
        return seconds[kind][stage] if kind in seconds else 0.0

    def check_all_done(self) -> None:
        wanted = [{F}] if self.problem.forward_only else [{F, B}, {F, I, W}]
        for stage in range(len(self.rank_of)):
            for k in range(self.problem.microbatches):
                passes = {kind for kind in (F, I, W, B) if Action(stage, kind, k) in self.times}
                if passes not in wanted:
                    raise _Fault(
                        f"the passes of microbatch {k} on stage {stage} are {passes}, and others "
                        "are required"
                    )
        if self.problem.options.vocab_parallel is not VocabularyParallel.NONE:
            self.check_vocabulary_done()
        away = [what for what, where in self.where.items() if where != "here"]
        if away:
            raise _Fault(f"outputs of these passes were never copied back from the host: {away}")
        waits = {Kind.SEND_F: Kind.WAIT_F, Kind.SEND_B: Kind.WAIT_B}
        for action in self.times:
            if action.microbatch >= self.problem.microbatches:
                raise _Fault(f"{action}: the step has no microbatch {action.microbatch}")
            wait = waits.get(action.kind)
            if wait and action._replace(kind=wait) not in self.times:
                raise _Fault(f"no action waits until {action} has been sent")
        self.check_data()

    def check_data(self) -> None:
        """Check the order of the data: each stage has its own iterator, whose n-th batch goes to
        the stage's n-th forward pass."""
        read: dict[tuple[int, Kind], list[int]] = defaultdict(list)
        for row in self.schedule.rows:
            for action in row:
                # BCAST_E, which comes before F of the first stage, also reads data: it sends the
                # tokens.
                if action.kind in (F, Kind.BCAST_E):
                    read[action.stage, action.kind].append(action.microbatch)
        if any(order != read[0, F] for order in read.values()):
            raise _Fault(f"stages read their data in different orders: {dict(read)}")

    def check_vocabulary_done(self) -> None:
        evaluated = {Kind.EMBEDDING, Kind.LOGITS, Kind.LOSS}
        wanted = evaluated if self.problem.forward_only else set(BROUGHT)
        for rank, stage in enumerate(self.first):
            of_rank = wanted if rank == self.rank_of[-1] else wanted - {Kind.LOSS}
            for k in range(self.problem.microbatches):
                passes = {kind for kind in BROUGHT if Action(stage, kind, k) in self.times}
                if passes != of_rank:
                    raise _Fault(
                        f"the passes of microbatch {k} on the shard of rank {rank} are {passes}, "
                        "and others are required"
                    )
                waits = {GIVEN[w] for w in GIVEN if Action(stage, w, k) in self.times}
                if waits != self.only_given(rank):
                    raise _Fault(
                        f"microbatch {k} on rank {rank}: the rank has waited for the "
                        f"collectives {waits}"
                    )


# For each copy, and wait for a copy: the pass whose output is copied, and where the output is
# before and after.
COPIES: dict[Kind, tuple[Kind, str, str]] = {
    Kind.OFFLOAD_F: (F, "here", "leaving"),
    Kind.FREE_F: (F, "leaving", "gone"),
    Kind.RELOAD_F: (F, "gone", "here"),
    Kind.OFFLOAD_I: (I, "here", "leaving"),
    Kind.FREE_I: (I, "leaving", "gone"),
    Kind.RELOAD_I: (I, "gone", "here"),
}


USERS: dict[Kind, tuple[Kind, ...]] = {F: (I, B), I: (W,)}


COPIED_BACK = {I: (Kind.RELOAD_F, F), B: (Kind.RELOAD_F, F), W: (Kind.RELOAD_I, I)}


# Collectives that bring the inputs of the vocabulary's passes.
BROUGHT = {
    Kind.EMBEDDING: Kind.BCAST_E,
    Kind.LOGITS: Kind.BCAST_S,
    Kind.LOSS: Kind.GATHER_S,
    Kind.LOGITS_INPUT: Kind.GATHER_S,
    Kind.LOGITS_WEIGHT: Kind.BCAST_SW,
    Kind.EMBEDDING_WEIGHT: Kind.BCAST_EW,
}


GIVEN = {
    Kind.WAIT_S: Kind.GATHER_S,
    Kind.WAIT_SI: Kind.REDUCE_SI,
    Kind.WAIT_E: Kind.REDUCE_E,
}


# For each collective: the stage whose rank alone gives a tensor (None if every rank does), and the
# kinds of passes that can have computed it. No pass computes the tokens that BCAST_E sends.
MADE: dict[Kind, tuple[int | None, tuple[Kind, ...]]] = {
    Kind.BCAST_E: (0, ()),
    Kind.REDUCE_E: (None, (Kind.EMBEDDING,)),
    Kind.BCAST_S: (-1, (F,)),
    Kind.GATHER_S: (None, (Kind.LOGITS,)),
    Kind.BCAST_SW: (-1, (Kind.LOSS,)),
    Kind.REDUCE_SI: (None, (Kind.LOGITS_INPUT,)),
    Kind.BCAST_EW: (0, (I, B)),
}


class _BatchedRanks(_Ranks):
    """Ranks that send batched messages, all of them over one communicator."""

    def __init__(self, schedule: Schedule, problem: Problem, held_up: bool) -> None:
        super().__init__(schedule, problem, held_up)
        self.batches = [deque(_batches(row)) for row in schedule.rows]
        # time at which the latest batch of messages of each rank had arrived
        self.ended = [0.0 for _ in schedule.rows]

    def is_free_for(self, action: Action, before: Sequence[Action]) -> bool:
        return (
            not self.held_up
            or action.kind in (Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B)
            or all(earlier in self.times for earlier in before)
        )

    def move_messages(self) -> bool:
        moving = False
        for rank, batches in enumerate(self.batches):
            send = batches[0][-1] if batches else None
            if send is None or send.kind not in (Kind.SEND_F, Kind.SEND_B) or send in self.times:
                continue
            there = self.rank_of[send.stage + (1 if send.kind is Kind.SEND_F else -1)]
            ways = [(rank, there, True), (rank, there, False)]
            receives = [
                action
                for action in (self.batches[there][0] if self.batches[there] else [])
                if action not in self.times and any(action in self.receives[way] for way in ways)
            ]
            if send in self.started and receives and self.has_begun(there):
                starts = [self.started[send], self.started[receives[0]]]
                self.move(send, receives[0], max(*starts, self.ended[rank], self.ended[there]))
                moving = True
        for rank, batches in enumerate(self.batches):
            while batches and all(action in self.times for action in batches[0]):
                batch = batches.popleft()
                self.ended[rank] = max(self.times[action][1] for action in batch)
                self.there |= dict.fromkeys(batch, self.ended[rank])
                moving = True
        return moving

    def has_begun(self, rank: int) -> bool:
        return all(action in self.started for action in self.batches[rank][0])


def _batches(row: Iterable[Action]) -> Iterator[list[Action]]:
    """Yield each send with the receives directly before it, and other receives one by one."""
    receives: list[Action] = []
    for action in row:
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            receives.append(action)
            continue
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            yield [*receives, action]
        else:
            yield from ([receive] for receive in receives)
        receives = []
    yield from ([receive] for receive in receives)
