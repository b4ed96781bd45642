"""The proof of a schedule; nothing runs without it.

A wrong schedule does not fail: it hangs a cluster, or trains on wrong gradients. So everything that
could go wrong at run time is checked once, before a step: each pass is done exactly once and after
its inputs, nothing waits in a cycle, ranks agree on every order, and memory stays within its limit.
`prove` alone makes a `Program`, and nothing else can be run.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby, product
from operator import itemgetter
from typing import NoReturn

import numpy as np

from megatron_ext.base.words import counted
from megatron_ext.compile.program.graph import (
    Device,
    Graph,
    Needs,
    build_graph,
    channel_of,
    has_place,
    needed_numbers,
    partner_of,
    partners_of,
    slice_looked_for,
)
from megatron_ext.compile.program.memory import Amount, held_during, limited_amount, peaks
from megatron_ext.compile.program.pairs import what_is_wrong
from megatron_ext.compile.program.speculation import can_be_undone, first_crossing, settles_at
from megatron_ext.compile.program.stock_messages import as_stock_runs
from megatron_ext.schedule.action import Action, Kind, Slice, whole_of
from megatron_ext.schedule.action_arrays import IS_COLLECTIVE, IS_RECEIVE, IS_SEND, Flags, Ints
from megatron_ext.schedule.kinds import (
    RULES,
    Lane,
    Where,
)
from megatron_ext.schedule.limit import MemoryLimit, fits
from megatron_ext.schedule.problem import P2P, Problem, ScheduleOptions
from megatron_ext.schedule.schedule import Schedule, is_compute

_SEAL = object()


class InvalidSchedule(ValueError):
    """Error about a schedule that must not run. ``actions`` are the first actions at fault."""

    def __init__(self, message: str, actions: Sequence[Action] = ()) -> None:
        super().__init__(message)
        self.actions = tuple(actions)


class OverLimit(InvalidSchedule):
    """Error about a schedule that holds more memory than its limit allows.

    ``least`` is the least sufficient limit that its message names, in the unit of the memory limit.
    """

    least = math.inf

    def naming(self, least: float, limit: MemoryLimit) -> OverLimit:
        """Return this error with ``least`` as the sufficient limit, if that is lower.

        Another schedule of the family meets this limit.
        """
        enough = f"{limit.at_least(least)} is enough for another of this family:"
        text = str(self).replace(_names(limit.at_least(self.least)), enough)
        other = OverLimit(text if least < self.least else str(self), self.actions)
        other.least = least
        return other


def _names(least: str) -> str:
    return f"the least feasible limit for it is {least}:"


@dataclass(frozen=True)
class Program:
    """A proved schedule: `execute` and `simulate` accept nothing else, and only `prove` makes one.

    Attributes:
        known_order: the numbers of its actions, each after all it waits for on any `Device`; None
            if messages are batched.
    """

    schedule: Schedule
    problem: Problem
    # The seal is an InitVar, since `dataclasses.replace` would copy a field and so skip the proof.
    seal: InitVar[object]
    known_order: Ints | None = field(default=None, repr=False, compare=False)

    def __post_init__(self, seal: object) -> None:
        if seal is not _SEAL:
            raise TypeError("a Program is made by prove(schedule, problem) and by nothing else")

    @cached_property
    def graph(self) -> Graph:
        """Graph of which of the program's actions waits for which."""
        p2p = self.problem.options.p2p
        return build_graph(self.schedule, p2p, known_order=self.known_order)

    @cached_property
    def as_run(self) -> tuple[Schedule, Graph]:
        """The schedule with messages as its executor posts them, and its graph of waits.

        They are the program's own, unless Megatron's pipeline functions run it
        (`Problem.executor`).
        """
        executor = self.problem.executor
        run = None if executor is None else as_stock_runs(self.schedule, executor)
        return (self.schedule, self.graph) if run is None else run

    @property
    def is_run_by_stock(self) -> bool:
        """Whether Megatron's own pipeline functions run the program, with their waits
        (`as_run`)."""
        return self.as_run[0] is not self.schedule

    @property
    def text(self) -> str:
        """All actions of each rank, in order, one line per rank: ``0F0,0SEND_F0,0RECV_B0``."""
        cells = self.schedule.cells
        return "".join(f"{','.join(cells(row))}\n" for row in self.schedule.rows)

    @cached_property
    def digest(self) -> str:
        """Hash that is equal on two ranks exactly if they hold the same program."""
        text = f"{self.problem.options.p2p}\n{self.schedule.placement.rank_of}\n{self.text}"
        if self.problem.slices.count > 1:
            text += f"slices that end at {self.problem.slice_ends}\n"
        return hashlib.sha256(text.encode()).hexdigest()


def check_compute(schedule: Schedule, problem: Problem) -> None:
    """Check a schedule of compute passes without messages: the first part of the proof.

    Transforms rely on it: their input is complete and every pass is on its stage's rank.

    Raises:
        InvalidSchedule: as `prove`.
    """
    if schedule.placement.rank_of != problem.placement.rank_of:
        _reject(
            schedule,
            f"its placement has the stages on ranks {schedule.placement.rank_of}, and that of the "
            f"pipeline on ranks {problem.placement.rank_of}",
        )
    _check_places(schedule, problem)
    _check_all_done_once(schedule, problem, {Lane.COMPUTE})
    _check_needs(schedule)
    _check_data_order(schedule, problem, {Lane.COMPUTE})
    _check_pairs(schedule, problem)


def prove(schedule: Schedule, problem: Problem) -> Program:
    """Check everything that could go wrong at run time, and return the schedule as a `Program`.

    All work is done exactly once and on its rank. The needs of an action come before it. Forward
    passes of all stages have one order, in which each stage reads its data. Sends and receives
    match pairwise in the order of their channel (batched: of their two ranks), and collectives have
    one order on all ranks. There is no cyclic wait (`graph`), even if everything that a rank has
    posted blocks it. With post-validation, everything before the verdict on the last optimizer step
    can be undone (`speculation`). Memory is within the limit.

    Args:
        schedule: schedule with its messages (`communication`).
        problem: the problem that the schedule should solve.

    Raises:
        InvalidSchedule: names the first offending actions, with the cycle if there is one.
    """
    check_compute(schedule, problem)
    _check_all_done_once(schedule, problem, set(Lane))
    _check_data_order(schedule, problem, set(Lane))
    _check_channels(schedule, problem.options.p2p)
    _check_collectives(schedule)
    if problem.options.steps_overlap and not problem.forward_only:
        _check_speculation(schedule)
    known_order = _check_acyclic(schedule, problem.options.p2p)
    _check_memory(schedule, problem)
    return Program(schedule, problem, _SEAL, known_order)


def within_limit(program: Program, problem: Problem) -> Program:
    """Return ``program`` for ``problem``, which may differ from its own in the memory limit only.

    Raises:
        InvalidSchedule: the program does not meet the memory limit.
    """
    before = program.problem
    if problem == before:
        return program
    assert replace(problem, memory_limit=before.memory_limit) == before
    _check_memory(program.schedule, problem)
    made = Program(program.schedule, problem, _SEAL, program.known_order)
    vars(made).update(graph=program.graph, as_run=program.as_run)
    return made


def _check_acyclic(schedule: Schedule, p2p: P2P) -> Ints | None:
    """Reject a schedule that would deadlock; return an order with each action after all it waits
    for.

    The order is that of `Program.known_order`; None if messages are batched.
    """
    known_order, where = None, ""
    if p2p is P2P.BATCHED:
        # With batched messages a single hardware queue adds no waits: an action that needs a later
        # action of its own rank needs a message of that action, and every message waits for all
        # earlier batches anyway.
        cycle = build_graph(schedule, p2p).cycle()
    else:
        # A wait that blocks a device with parallel streams also blocks a device with one queue, so
        # the graph of one queue is checked first.
        one_queue = build_graph(schedule, p2p, Device.ONE_QUEUE)
        known_order, cycle = one_queue.order, one_queue.cycle()
        if cycle and (side_by_side := build_graph(schedule, p2p).cycle()):
            cycle = side_by_side
        elif cycle:
            where = f" on a device where {Device.ONE_QUEUE.value} can block what comes next"
    if cycle:
        names = _named(cycle, schedule)
        path = " waits for ".join([*names, names[0]])
        _reject(schedule, f"it would hang{where}: {path}", cycle)
    return known_order


def _named(cycle: Sequence[Action], schedule: Schedule) -> list[str]:
    """Return the text of each action of a cyclic wait; two overlapped passes have one text."""
    pairs = {action: overlapped for overlapped in schedule.pairs for action in overlapped}
    names = [name for name, _ in groupby(str(pairs.get(action, action)) for action in cycle)]
    return names[:-1] if len(names) > 1 and names[0] == names[-1] else names


def _reject(schedule: Schedule, why: str, actions: Sequence[Action] = ()) -> NoReturn:
    raise InvalidSchedule(f"schedule {schedule.name} is invalid: {why}", actions)


def _check_places(schedule: Schedule, problem: Problem) -> None:
    placement = schedule.placement
    if len(schedule.rows) != placement.ranks:
        _reject(
            schedule,
            f"it has {counted(len(schedule.rows), 'row')} for {counted(placement.ranks, 'rank')}",
        )
    _check_slices(schedule, problem)
    for rank, row in enumerate(schedule.rows):
        if _are_at_home(row, placement.stages_of[rank], problem.pieces):
            continue
        for action in row:
            if not 0 <= action.stage < placement.stages:
                _reject(
                    schedule,
                    f"{action} is of stage {action.stage}, and the stages are 0 to "
                    f"{placement.last}",
                    [action],
                )
            if not 0 <= action.microbatch < problem.pieces:
                _reject_microbatch(schedule, problem, action, row)
            home = placement.rank_of[action.stage]
            if home != rank:
                _reject(
                    schedule,
                    f"{action} is on rank {rank}; stage {action.stage} is on rank {home}",
                    [action],
                )


def _check_slices(schedule: Schedule, problem: Problem) -> None:
    count = problem.slices.count
    if count == schedule.arrays.slices == 1:
        return
    for action in chain.from_iterable(schedule.rows):
        part = action.microbatch
        if (part.slices if isinstance(part, Slice) else 1) != count:
            cut = f"are cut into {count} slices" if count > 1 else "are not cut into slices"
            _reject(schedule, f"it has {action}, and microbatches {cut}", [action])


def _are_at_home(row: Sequence[Action], stages: Sequence[int], pieces: int) -> bool:
    """Return whether all actions of a rank's ``row`` are of its stages and of existing
    microbatches."""
    if not set(map(itemgetter(0), row)) <= set(stages):
        return False
    least, most = (find(map(itemgetter(2), row), default=0) for find in (min, max))
    return least >= 0 and most < pieces


def _reject_microbatch(
    schedule: Schedule, problem: Problem, action: Action, row: Sequence[Action]
) -> NoReturn:
    """Reject an action whose microbatch does not exist, and name the action that is missing in its
    place."""
    expected = [action._replace(microbatch=k) for k in problem.forwards]
    missing = [other for other in expected if other not in row][:1]
    but = f"; {missing[0]} is missing" if missing else ""
    _reject(
        schedule,
        f"{action} is of microbatch {whole_of(action.microbatch)}, and the microbatches are 0 to "
        f"{problem.microbatches - 1}{but}",
        [action, *missing],
    )


def _required_work(
    schedule: Schedule, problem: Problem, lanes: set[Lane]
) -> dict[int, dict[Kind, Kind]]:
    """Return the passes that each stage must do for a microbatch, by the kind of action that does
    it.

    If several kinds can do the pass (B or I), it is the kind that the schedule uses. Optional work
    (`Rule.all_or_none`) is included.
    """
    used = {kind for _, kind in schedule.arrays.stage_kinds}
    kinds = [kind for kind, rule in RULES.items() if rule.lane in lanes]
    kinds.sort(key=lambda kind: kind not in used)
    to_do: dict[int, dict[Kind, Kind]] = defaultdict(dict)
    for stage in range(schedule.placement.stages):
        for kind in kinds:
            if _is_required(kind, stage, problem):
                for covered in RULES[kind].covers:
                    to_do[stage].setdefault(covered, kind)
    return to_do


def _is_required(kind: Kind, stage: int, problem: Problem) -> bool:
    """Return whether ``stage`` must have actions of ``kind``, at least for some microbatches."""
    if RULES[kind].repeats is not None and stage >= problem.options.recompute.first:
        return False
    return _belongs(kind, stage, problem)


def _belongs(kind: Kind, stage: int, problem: Problem) -> bool:
    """Return whether ``stage`` may have actions of ``kind`` in a schedule for ``problem``."""
    option = RULES[kind].option
    if option and not problem.options.requests(option):
        return False
    return has_place(
        kind, stage, problem.placement, problem.forward_only, problem.first_trained_stage
    )


def _why_not(kind: Kind, stage: int, problem: Problem) -> str:
    rule = RULES[kind]
    if rule.option and not problem.options.requests(rule.option):
        return f"belongs to {ScheduleOptions.name_of(rule.option)}, which is not requested"
    if problem.forward_only and not rule.in_evaluation:
        return "has no place in an evaluation"
    if problem.first_trained_stage and has_place(kind, stage, problem.placement):
        return f"has no place, as nothing before stage {problem.first_trained_stage} is trained"
    if rule.neighbour is not None:
        return "has no other rank to talk to"
    return f"is on a stage that is not {rule.where.value}"


# Flags by stage and kind, which tell for each microbatch whether its pass has been seen.
_Done = dict[tuple[int, Kind], Flags]


def _check_all_done_once(schedule: Schedule, problem: Problem, lanes: set[Lane]) -> None:
    done = _done(schedule, problem)
    for stage, to_do in _required_work(schedule, problem, lanes).items():
        if all(done[stage, kind].all() for kind in to_do):
            continue
        for microbatch, kind in product(problem.forwards, to_do):
            if _is_missing(stage, kind, microbatch, done):
                action = Action(stage, to_do[kind], microbatch)
                rank = schedule.placement.rank_of[stage]
                _reject(
                    schedule,
                    f"{action} is missing on rank {rank}: nothing does the {RULES[kind].does}",
                    [action],
                )


def _done(schedule: Schedule, problem: Problem) -> _Done:
    """Return, by stage and kind of pass, for which microbatches ``schedule`` does the pass.

    Rejects work that is done twice or on a stage where it does not belong.
    """
    arrays, microbatches = schedule.arrays, problem.pieces
    work, parts = arrays.work
    which = parts * microbatches + arrays.microbatch[:, np.newaxis]
    times = np.bincount(which[parts >= 0], minlength=len(work) * microbatches)
    belong = all(_belongs(kind, stage, problem) for stage, kind in arrays.stage_kinds)
    if not belong or times.max(initial=0) > 1:
        _reject_what_is_too_much(schedule, problem)
    done: _Done = defaultdict(lambda: np.zeros(microbatches, dtype=bool))
    done.update(zip(work, times.reshape(len(work), microbatches) > 0, strict=True))
    return done


def _reject_what_is_too_much(schedule: Schedule, problem: Problem) -> None:
    """Reject the first action that is done twice, or that does not belong on its stage."""
    done = set()
    for action in chain.from_iterable(schedule.rows):
        stage, kind, microbatch = action
        if not _belongs(kind, stage, problem):
            _reject(schedule, f"{action} {_why_not(kind, stage, problem)}", [action])
        for covered in RULES[kind].covers:
            work = stage, covered, microbatch
            if work in done:
                what = RULES[covered].does
                _reject(schedule, f"{action} does the {what} a second time", [action])
            done.add(work)


def _is_missing(stage: int, kind: Kind, microbatch: int, done: _Done) -> bool:
    if done[stage, kind][microbatch]:
        return False
    if RULES[kind].where is Where.RANK:
        # An action that occurs once a step has the number 0 as its microbatch.
        return microbatch == 0
    group = RULES[kind].all_or_none
    return group is None or any(
        done[stage, other][microbatch] for other, rule in RULES.items() if rule.all_or_none is group
    )


def _check_needs(schedule: Schedule) -> None:
    arrays, placement = schedule.arrays, schedule.placement
    if all((at < arrays.numbers).all() for at in needed_numbers(arrays, placement)):
        return
    wanted = Needs(placement)
    for row in schedule.rows:
        position: dict[tuple[int, Kind, int], int] = {a: index for index, a in enumerate(row)}
        for index, action in enumerate(row):
            for stage, kind, which in wanted[action.stage, action.kind]:
                part = slice_looked_for(which, action.microbatch)
                if part is not None and position.get((stage, kind, part), -1) > index:
                    late = Action(stage, kind, part)
                    _reject(
                        schedule, f"{action} comes before {late}, which it needs", [action, late]
                    )


def _check_data_order(schedule: Schedule, problem: Problem, lanes: set[Lane]) -> None:
    """Check that all stages read the data of the microbatches, or of their slices, in one order.

    Each stage has a data iterator of its own. If two stages read in different orders, the hidden
    states of one microbatch meet the labels, masks or positions of another, and nothing fails.
    """
    arrays = schedule.arrays
    reads = [RULES[kind].reads_data and RULES[kind].lane in lanes for _, kind in arrays.stage_kinds]
    nodes = arrays.numbers[np.array(reads, dtype=bool)[arrays.stage_kind]]
    nodes = nodes[np.argsort(arrays.stage_kind[nodes], kind="stable")].reshape(-1, problem.pieces)
    orders = arrays.microbatch[nodes]
    differs = orders != orders[0]
    if not differs.any():
        return
    number = int(differs.any(axis=0).argmax())
    row = int(differs[:, number].argmax())
    actions = tuple(chain.from_iterable(schedule.rows))
    other, first = (actions[nodes[at, number]] for at in (row, 0))
    _reject(
        schedule,
        f"{other} is the {RULES[other.kind].does} number {number + 1} of stage {other.stage}, and "
        f"{first} is the {RULES[first.kind].does} number {number + 1} of stage {first.stage}; a "
        f"stage reads its data in this order, so microbatches would meet the labels of others: "
        f"give all stages one order of forward passes",
        [other, first],
    )


def _check_pairs(schedule: Schedule, problem: Problem) -> None:
    if schedule.pairs and not problem.options.pairs:
        overlapped = min(schedule.pairs)
        _reject(
            schedule,
            f"it has {overlapped}, and pairs of passes are not requested",
            list(overlapped),
        )
    wrong = what_is_wrong(schedule)
    if wrong is not None:
        _reject(schedule, *wrong)


def _check_channels(schedule: Schedule, p2p: P2P) -> None:
    # With one communicator the activations and the gradients that one rank sends to another share a
    # channel.
    ends = 2 if p2p is P2P.BATCHED else 3
    if _ends_meet(schedule, ends):
        return
    sent: dict[tuple[object, ...], list[Action]] = defaultdict(list)
    received: dict[tuple[object, ...], list[Action]] = defaultdict(list)
    for row in schedule.rows:
        for action in row:
            rule = RULES[action.kind]
            if rule.is_message:
                lane = sent if rule.lane is Lane.SEND else received
                lane[channel_of(action, schedule.placement)[:ends]].append(action)
    for channel, sends in sent.items():
        for send, receive in zip(sends, received[channel], strict=True):
            partner = partner_of(send, schedule.placement)
            if partner != receive:
                _reject(
                    schedule,
                    f"messages cross from rank {channel[0]} to rank {channel[1]}: "
                    f"{send} would meet {receive}, not {partner}",
                    [send, receive],
                )


def _ends_meet(schedule: Schedule, ends: int) -> bool:
    """Return whether the k-th send and the k-th receive between two ranks are one message.

    Args:
        ends: how many entries of a `Channel` have to be equal for messages to share an order: 2 for
            sender and receiver, or all of them.
    """
    arrays, placement = schedule.arrays, schedule.placement
    numbers: dict[tuple[object, ...], int] = {}
    channel_numbers = [
        numbers.setdefault(channel_of(Action(stage, kind, 0), placement)[:ends], len(numbers))
        if RULES[kind].is_message
        else -1
        for stage, kind in arrays.stage_kinds
    ]
    channel = np.array(channel_numbers, dtype=np.int32)[arrays.stage_kind]

    def by_channel(is_lane: Flags) -> Ints:
        nodes = arrays.numbers[is_lane[arrays.kind]]
        return nodes[np.argsort(channel[nodes], kind="stable")]

    sends, receives = by_channel(IS_SEND), by_channel(IS_RECEIVE)
    return np.array_equal(partners_of(arrays, placement)[sends], receives)


def _check_collectives(schedule: Schedule) -> None:
    """Check that all ranks call each kind of collective in one order.

    Each kind of collective has its own communicator.
    """
    if not IS_COLLECTIVE[schedule.arrays.kind].any():
        return
    called: list[dict[Kind, list[Action]]] = [defaultdict(list) for _ in schedule.rows]
    for row, calls in zip(schedule.rows, called, strict=True):
        for action in row:
            if RULES[action.kind].lane is Lane.COLLECTIVE:
                calls[action.kind].append(action)
    for rank, calls in enumerate(called):
        for kind, actions in calls.items():
            for first, other in zip(called[0][kind], actions, strict=True):
                if first.microbatch != other.microbatch:
                    _reject(
                        schedule,
                        f"collectives cross: {first} of rank 0 would meet {other} of rank {rank}",
                        [first, other],
                    )


def _check_speculation(schedule: Schedule) -> None:
    """Reject a schedule that does too much before the verdict on the last optimizer step.

    An action before a rank's verdict must be one that can be undone on all ranks together.
    Optimizers must not step before the gradients are complete.
    """
    placement = schedule.placement
    for row in schedule.rows:
        settles = settles_at(row)
        lasting = [a for a in row[:settles] if not can_be_undone(a, placement)]
        if lasting:
            _reject(
                schedule,
                f"{lasting[0]} cannot be undone, and comes before the verdict on the last step",
                lasting[:1],
            )
        steps = next(at for at, action in enumerate(row) if action.kind is Kind.STEP)
        late = [action for action in row[steps:] if is_compute(action)]
        if late:
            _reject(schedule, f"{row[steps]} comes before {late[0]}", [row[steps], late[0]])
    crossing = first_crossing(schedule.rows, placement)
    if crossing is not None:
        _reject(
            schedule,
            f"{crossing[0]} comes before the verdict on the last step, and {crossing[1]} after it",
            crossing,
        )


def _check_memory(schedule: Schedule, problem: Problem) -> None:
    limit = problem.memory_limit
    if limit is None or problem.forward_only:
        return
    amount, allowed = limited_amount(limit, schedule, problem.costs)
    held = peaks(schedule, amount)
    for rank, peak in enumerate(held):
        if not fits(peak, allowed):
            row = schedule.rows[rank]
            held_by = zip(row, held_during(row, amount), strict=True)
            over = [action for action, now in held_by if not fits(now, allowed)]
            first = next((action for action in over if _takes_memory(action, amount)), over[0])
            least = limit.at_least(max(held))
            refusal = OverLimit(
                f"schedule {schedule.name} is invalid: {first} brings rank {rank} over the memory "
                f"limit of {limit}: the schedule's peak there is {limit.at_least(peak)}; "
                f"{_names(least)} give at least that, or take a schedule that holds less",
                [first],
            )
            refusal.least = max(held)
            raise refusal


def _takes_memory(action: Action, amount: Amount) -> bool:
    return is_compute(action) or any(
        amount(held, action.stage) for held in RULES[action.kind].acquires
    )
