"""Packing problem of a search: a job shop, in whole ticks of time and whole units of memory.

A search packs millions of passes, and must find the same schedule on every machine. It therefore
does not work on actions, costs and stages, but on a problem of scheduling theory, in arrays of
whole numbers: a machine is a rank, a job is a microbatch, and an operation is one kind of pass on
one stage (`JobShop`). `job_shop_of` makes one of a problem, for any placement whose ranks have
equally many chunks. `starts_of` turns rows of a schedule into a plan, and `rows_of` packed starts
into rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from statistics import fmean

import numpy as np
import numpy.typing as npt

from megatron_ext.compile.program.memory import INPUT_SHARE, bytes_for, in_bytes
from megatron_ext.schedule.action import Action, Kind, Rows, token_share
from megatron_ext.schedule.action_arrays import action_arrays_of
from megatron_ext.schedule.kinds import RULES, Held
from megatron_ext.schedule.limit import with_rounding
from megatron_ext.schedule.placement import Neighbour, Placement
from megatron_ext.schedule.problem import Problem
from megatron_ext.search.ticks import common_tick

Starts = npt.NDArray[np.int64]  # starts of passes, shape (operations, columns)
Operations = tuple[tuple[int, Kind], ...]  # stage and kind of each operation
# Predecessors (or successors) of each operation: the number of the other operation, and the ticks
# of the message between the two.
Precedences = tuple[tuple[tuple[int, int], ...], ...]
# The same precedences by column (microbatch): the other operation and, for each column, the ticks
# of the message and the other operation's column.
ColumnPrecedences = list[list[tuple[int, list[int], list[int]]]]

F, R, I, W = (  # noqa: E741 (the field's letters)
    Kind.FORWARD,
    Kind.RECOMPUTE,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
)
KINDS = (F, I, W)
_NOT_YET = _NONE = -1
# Largest sum of the ticks of all stages' messages, since starts are integers of 32 bits.
_MOST_TICKS = 2**29
# Least number of ticks of a rank's work for a microbatch, since searches move passes by 1 % of that
# work.
_MIN_TICKS = 1_000
# Units that the memory of a chunk is counted in; slices of any length are whole units.
_SLICE_SHARES = 1 << 40


@dataclass(frozen=True)
class PassDifferences:
    """Durations, memory and message times of passes that differ between columns of a job shop.

    A column is a slice of a microbatch, and slices repeat in the next microbatch; or it is a
    microbatch of the step.

    Attributes:
        slices: number of slices of a microbatch; 1: microbatches are whole, and differ.
        durations: ticks, by operation and pass, in the order in which the operation runs them.
        memory_deltas: memory of each pass as in `JobShop.memory_deltas`, by operation and pass.
        p2p_ticks: ticks of the messages from other ranks that passes wait for, by operation and
            pass.
    """

    slices: int
    durations: Starts
    memory_deltas: Starts
    p2p_ticks: Starts

    @property
    def column_period(self) -> int:
        """Number of columns (microbatches or slices) after which the passes of an operation
        repeat."""
        return self.durations.shape[1]

    def mirrored(self, receivers: Sequence[int]) -> PassDifferences:
        """Return these numbers for time that runs backwards: memory deltas change their sign.

        Args:
            receivers: for each operation, the operation that its messages go to.
        """
        p2p_ticks = self.p2p_ticks[list(receivers), ::-1]
        return PassDifferences(
            self.slices, self.durations[:, ::-1], -self.memory_deltas[:, ::-1], p2p_ticks
        )


@dataclass(frozen=True)
class JobShop:
    """Packing problem of a search for schedules: passes are to be placed on ranks in time.

    - A machine is a rank, which runs one pass at a time.
    - A job is a microbatch. If microbatches are split into slices, a job is a slice. F runs the
      slices of a microbatch in order; I and W run them in reverse, because the last slice goes back
      first (`opposite_columns`).
    - An operation is one kind of pass on one stage. Each job has every operation once, and an
      operation runs the jobs in order. A *pass* is an operation of one job.

    The operations of a rank have consecutive numbers, in the order in which a microbatch runs
    through them there: F by chunk, I by chunk backwards, W likewise. With c chunks, rank r has
    operations 3cr to 3c(r+1)-1. With recompute there are also operations of R, before those of I.
    If the activation of a microbatch is stored, its pass of R takes no time and no memory, and no
    action is made of it (`recompute_actions`).

    Attributes:
        placement: which rank holds which stage.
        columns: number of passes of each operation: microbatches, or slices of them.
        tick: seconds of a tick.
        durations: ticks of a pass, by operation; the mean if passes differ.
        predecessors: for each operation, the operations that it waits for, with the ticks of the
            message between the two; the mean if they differ.
        memory_deltas: by operation, the memory that a pass acquires at its start, or, if negative,
            frees at its end; with slices the mean.
        limit: memory of a rank.
        microbatch_memory: for each rank, the most memory that one microbatch may need.
        release_times: for each rank, the earliest start.
        tails: for each rank, the time from its last end until everything has ended (delivery
            times). They are 0 unless steps overlap: a rank that starts later may then end later, so
            ranks that start sooner have the difference as their tail.
        recompute_deltas: memory that a pass acquires in addition to ``memory_deltas``, because its
            activation is recomputed: F acquires less, and R the difference. Shape (operations,
            columns). None: there are no operations of R.
        differences: differences between the passes of an operation; None if all are equal.
        is_mirrored: whether time runs backwards.
    """

    placement: Placement
    columns: int
    tick: float
    durations: tuple[int, ...]
    predecessors: Precedences
    memory_deltas: tuple[int, ...]
    limit: int
    microbatch_memory: tuple[int, ...]
    release_times: tuple[int, ...]
    tails: tuple[int, ...]
    recompute_deltas: Starts | None = None
    differences: PassDifferences | None = None
    is_mirrored: bool = False

    @property
    def operation_count(self) -> int:
        return len(self.durations)

    @property
    def slices(self) -> int:
        """Number of slices of a microbatch; 1 if microbatches are whole."""
        return 1 if self.differences is None else self.differences.slices

    @property
    def column_period(self) -> int:
        """Number of columns (microbatches or slices) after which passes repeat, without
        recompute."""
        return 1 if self.differences is None else self.differences.column_period

    @property
    def operations_per_rank(self) -> int:
        return self.operation_count // self.placement.ranks

    @cached_property
    def work(self) -> int:
        """Mean ticks of compute that a microbatch, or a slice, takes on a rank."""
        return int(self.pass_durations.sum()) // (self.placement.ranks * self.columns)

    @cached_property
    def operations(self) -> Operations:
        """Stage and kind of pass of each operation of the job shop."""
        return operations_of(self.placement, self.recompute_deltas is not None)

    @cached_property
    def recompute_actions(self) -> npt.NDArray[np.bool_]:
        """For each pass, whether it is a recomputation R that is done. Shape (operations, columns).

        An R whose activation is stored takes no time, and no action is made of it.
        """
        if self.recompute_deltas is None:
            return np.zeros((self.operation_count, self.columns), dtype=bool)
        is_recompute = np.array([kind is R for _, kind in self.operations])
        return is_recompute[:, None] & (self.recompute_deltas != 0)

    @cached_property
    def pass_durations(self) -> Starts:
        """Duration of each pass in ticks. Shape (operations, columns)."""
        durations = self._by_pass(
            self.durations, None if self.differences is None else self.differences.durations
        )
        if self.recompute_deltas is not None:
            is_recompute = np.array([kind is R for _, kind in self.operations])
            durations[is_recompute[:, None] & (self.recompute_deltas == 0)] = 0
        return durations

    @cached_property
    def pass_memory_deltas(self) -> Starts:
        """Memory that each pass acquires, or, if negative, frees. Shape (operations, columns)."""
        deltas = self._by_pass(
            self.memory_deltas, None if self.differences is None else self.differences.memory_deltas
        )
        return deltas if self.recompute_deltas is None else deltas + self.recompute_deltas

    @cached_property
    def p2p_ticks(self) -> tuple[int, ...]:
        """By operation, ticks of the message from another rank that its passes wait for.

        It is the mean if passes differ. No pass waits for two messages.
        """
        return tuple(max((ticks for _, ticks in row), default=0) for row in self.predecessors)

    @cached_property
    def pass_p2p_ticks(self) -> Starts:
        """Ticks of the message that each pass of the job shop waits for. Shape (operations,
        columns)."""
        return self._by_pass(
            self.p2p_ticks, None if self.differences is None else self.differences.p2p_ticks
        )

    def _by_pass(self, by_operation: tuple[int, ...], differing: Starts | None) -> Starts:
        """Return a number for each pass: ``differing`` if passes differ, else one number per
        operation.

        The shape is (operations, columns).
        """
        if differing is not None:
            return np.tile(differing, (1, self.columns // self.column_period))
        return np.repeat(np.array(by_operation, np.int64)[:, None], self.columns, 1)

    @cached_property
    def held_after(self) -> Starts:
        """Memory that the first n passes of each operation acquire together, for all n.

        Shape (operations, columns + 1).
        """
        held = np.zeros((self.operation_count, self.columns + 1), np.int64)
        np.cumsum(self.pass_memory_deltas, axis=1, out=held[:, 1:])
        return held

    @cached_property
    def next_acquiring(self) -> Starts:
        """For each operation and column n, the next column from n on whose pass acquires memory.

        It is the number of columns if there is none. Shape (operations, columns + 1), as n may also
        be the number of columns.
        """
        m = self.columns
        first = np.full((self.operation_count, m + 1), m, np.int64)
        acquiring = np.where(self.pass_memory_deltas > 0, np.arange(m), m)
        first[:, :m] = np.minimum.accumulate(acquiring[:, ::-1], axis=1)[:, ::-1]
        return first

    @property
    def operation_order(self) -> tuple[int, ...]:
        """Order of a rank's operations, from 0, in which one microbatch alone runs through them.

        In this order an activation is freed before the next one is recomputed. () if there are no
        operations of R.
        """
        if self.recompute_deltas is None:
            return ()
        order = _operation_order(self.placement)
        return order[::-1] if self.is_mirrored else order

    @property
    def fits(self) -> bool:
        """Whether any plan can be packed: each rank's memory limit suffices for a microbatch."""
        return max(self.microbatch_memory) <= self.limit

    @cached_property
    def opposite_columns(self) -> list[int]:
        """For each column of forward passes, the column of I and W with the same slice, and the
        reverse."""
        columns = np.arange(self.columns)
        return (columns - 2 * (columns % self.slices) + self.slices - 1).tolist()

    @cached_property
    def period_offsets(self) -> Starts:
        """Number of periods by which each pass is later than the first in a plan that repeats.

        Shape (operations, columns).
        """
        later = [0 if forward else self.slices - 1 for forward in self.is_forward]
        return np.array(later, np.int64)[:, None] + np.arange(self.columns)

    @cached_property
    def is_forward(self) -> list[bool]:
        """For each operation, whether it is a forward pass."""
        return [kind is F for _, kind in self.operations]

    @cached_property
    def successors(self) -> Precedences:
        """For each operation, the operations that wait for it, with the ticks of the messages."""
        return _successors(self.predecessors)

    @cached_property
    def predecessors_by_column(self) -> ColumnPrecedences:
        """The predecessors of each operation, with message ticks and columns for each column."""
        return self._by_column(self.predecessors, lambda op, other: op)

    @cached_property
    def successors_by_column(self) -> ColumnPrecedences:
        """The successors of each operation, with message ticks and columns for each column."""
        return self._by_column(self.successors, lambda op, other: other)

    def _by_column(
        self, precedences: Precedences, receiver: Callable[[int, int], int]
    ) -> ColumnPrecedences:
        none, same = [0] * self.columns, list(range(self.columns))
        p2p_ticks, is_forward = self.pass_p2p_ticks.tolist(), self.is_forward
        return [
            [
                (
                    other,
                    p2p_ticks[receiver(op, other)] if ticks else none,
                    same if is_forward[op] == is_forward[other] else self.opposite_columns,
                )
                for other, ticks in row
            ]
            for op, row in enumerate(precedences)
        ]

    def mirrored(self) -> JobShop:
        """Return the same packing problem with time running backwards."""
        receivers = [
            next((other for other, ticks in row if ticks), op)
            for op, row in enumerate(self.successors)
        ]
        return JobShop(
            self.placement,
            self.columns,
            self.tick,
            self.durations,
            self.successors,
            tuple(-delta for delta in self.memory_deltas),
            self.limit,
            self.microbatch_memory,
            release_times=self.tails,
            tails=self.release_times,
            recompute_deltas=None
            if self.recompute_deltas is None
            else -self.recompute_deltas[:, ::-1],
            differences=None if self.differences is None else self.differences.mirrored(receivers),
            is_mirrored=not self.is_mirrored,
        )


# The result is cached, since a search makes many job shops of one placement.
@lru_cache(maxsize=8)
def _operation_order(placement: Placement) -> tuple[int, ...]:
    """Return the order of a rank's operations for one microbatch alone (`JobShop.operation_order`).

    Time runs forwards.
    """
    kinds = {F: 0, R: 1, I: 2, W: 3}
    stages = placement.stages_of[0]
    chunks = {stage: chunk for chunk, stage in enumerate(stages)}
    operations = operations_of(placement, with_recompute=True)[: len(kinds) * len(stages)]
    return tuple(
        sorted(
            range(len(operations)),
            key=lambda op: (
                (0, chunks[operations[op][0]], 0)
                if operations[op][1] is F
                else (1, -chunks[operations[op][0]], kinds[operations[op][1]])
            ),
        )
    )


@lru_cache(maxsize=8)
def _successors(predecessors: Precedences) -> Precedences:
    """Return the successors of each operation, given the predecessors of each (`JobShop`)."""
    rows: list[list[tuple[int, int]]] = [[] for _ in predecessors]
    for op, waits_for in enumerate(predecessors):
        for other, ticks in waits_for:
            rows[other].append((op, ticks))
    return tuple(map(tuple, rows))


@lru_cache(maxsize=8)
def operations_of(placement: Placement, with_recompute: bool = False) -> Operations:
    """Return stage and kind of each operation of a job shop; ``with_recompute`` includes R."""
    kinds = (R, I, W) if with_recompute else (I, W)
    return tuple(
        operation
        for stages in placement.stages_of
        for operation in (
            *((stage, F) for stage in stages),
            *((stage, kind) for kind in kinds for stage in reversed(stages)),
        )
    )


def job_shop_of(problem: Problem, recomputed: npt.NDArray[np.bool_] | None = None) -> JobShop:
    """Return the packing problem (job shop) of ``problem``, whose ranks have equally many chunks.

    The tick is the common unit of the costs (`common_tick`), divided by the smallest whole number
    for which a rank's work for a mean microbatch, or a slice, takes at least 1,000 ticks.

    Args:
        recomputed: whether an activation is recomputed, of shape (stages, microbatches). None: no
            activation is recomputed, and there are no operations of R. With slices it must be None.

    Raises:
        ValueError: the limit is in bytes, and the costs have none; or messages take longer than
            whole ticks can count.
    """
    placement, costs, parts = problem.placement, problem.costs, problem.examples
    assert {len(stages) for stages in placement.stages_of} == {placement.chunks}
    operations = operations_of(placement, recomputed is not None)
    seconds = [
        [costs.of(Action(stage, kind, part)) for part in _in_order(kind, parts, problem)]
        for stage, kind in operations
    ]
    work = sum(
        fmean(row) for row, (_, kind) in zip(seconds, operations, strict=True) if kind is not R
    )
    work /= placement.ranks
    p2p_seconds = _p2p_seconds(problem)
    means = {link: fmean(row) for link, row in p2p_seconds.items()}
    unit = common_tick([*chain(*seconds), *(means.values() or [costs.links.p2p_seconds])], work)
    tick = unit / math.ceil(_MIN_TICKS * unit / work)
    longest = max(means.values(), default=0.0)
    if longest * placement.stages > _MOST_TICKS * tick:
        raise ValueError(
            f"costs: a message takes {longest / work:.3g} times as long as the passes of a "
            "microbatch on a rank, which is too long for the unit of time in which searches "
            "count: write all costs in one unit"
        )
    # A pass that costs nothing still takes one tick, so that its place in the order is defined.
    durations = [[max(round(figure / tick), 1) for figure in row] for row in seconds]
    activation, rest, stored, limit = _memory(problem, recomputed is not None)
    slices = problem.slices.count
    recompute_deltas = None
    if recomputed is not None:
        recompute_deltas = np.zeros((len(operations), problem.microbatches), np.int64)
        for op, (stage, kind) in enumerate(operations):
            if kind in _RECOMPUTE_SIGN:
                recompute_deltas[op] = (
                    _RECOMPUTE_SIGN[kind] * (activation[stage] - stored[stage]) * recomputed[stage]
                )
    return JobShop(
        placement,
        problem.pieces,
        tick,
        tuple(round(fmean(row)) for row in durations),
        _predecessors(
            placement, {link: round(mean / tick) for link, mean in means.items()}, operations
        ),
        tuple(
            _memory_delta(kind, activation[stage] // slices, rest[stage] // slices)
            for stage, kind in operations
        ),
        limit,
        tuple(_microbatch_memory(problem, activation, rest)),
        release_times=(0,) * placement.ranks,
        tails=_tails(problem, tick),
        recompute_deltas=recompute_deltas,
        differences=_pass_differences(
            problem, operations, tick, durations, p2p_seconds, activation, rest
        )
        if len(parts) > 1
        else None,
    )


def _p2p_seconds(problem: Problem) -> dict[int, list[float]]:
    """Return the seconds of messages on each link between two ranks, for each of
    `Problem.examples`.

    The key is a stage s; the link is the one between the ranks of stages s and s + 1.
    """
    placement, costs, parts = problem.placement, problem.costs, problem.examples
    links = [s for s in range(placement.last) if placement.is_remote(s, Neighbour.NEXT)]
    if len(parts) == 1:
        return {stage: [costs.p2p_seconds_behind(stage)] for stage in links}
    return {
        stage: [costs.of(Action(stage, Kind.SEND_F, part)) for part in parts] for stage in links
    }


def _in_order[T](kind: Kind, parts: Sequence[T], problem: Problem) -> Sequence[T]:
    """Return microbatches or slices, or their costs, in the order in which ``kind`` runs them.

    Backward passes run the slices of a microbatch in reverse.
    """
    return parts if kind is F or problem.slices.count == 1 else parts[::-1]


def _pass_differences(
    problem: Problem,
    operations: Sequence[tuple[int, Kind]],
    tick: float,
    durations: Sequence[Sequence[int]],
    p2p_seconds: Mapping[int, Sequence[float]],
    activation: Sequence[int],
    rest: Sequence[int],
) -> PassDifferences:
    parts = problem.examples
    deltas = [
        [
            _memory_delta(
                kind, math.ceil(share * activation[stage]), math.ceil(share * rest[stage])
            )
            for share in map(token_share, _in_order(kind, parts, problem))
        ]
        for stage, kind in operations
    ]
    none = [0.0] * len(parts)
    p2p_ticks = [
        [
            round(seconds / tick)
            for seconds in _in_order(kind, p2p_seconds.get(stage - (kind is F), none), problem)
        ]
        for stage, kind in operations
    ]
    tables = (np.array(table, np.int64) for table in (durations, deltas, p2p_ticks))
    return PassDifferences(problem.slices.count, *tables)


# Signs of the memory that a pass allocates in addition if its activation is recomputed: F allocates
# less, R more.
_RECOMPUTE_SIGN = {F: -1, R: 1}


def _predecessors(
    placement: Placement, p2p_ticks: Mapping[int, int], operations: Sequence[tuple[int, Kind]]
) -> Precedences:
    """Return for each operation those that it waits for, and how long their messages take.

    The form is that of `JobShop.predecessors`. ``p2p_ticks[s]`` is the time of a message between
    stages s and s + 1, in ticks.
    """
    op_of = {key: op for op, key in enumerate(operations)}

    def on(stage: int, *kinds: Kind) -> tuple[tuple[int, int], ...]:
        """Return the operation on ``stage`` of the first of ``kinds`` that exists there."""
        return ((next(op_of[stage, kind] for kind in kinds if (stage, kind) in op_of), 0),)

    def waits_for(stage: int, kind: Kind) -> tuple[tuple[int, int], ...]:
        if kind is W:
            return on(stage, I)
        if kind is R:
            return on(stage, F)
        which = Neighbour.PREVIOUS if kind is F else Neighbour.NEXT
        other = placement.neighbour(stage, which)
        if other is None:
            return () if kind is F else on(stage, R, F)
        ticks = p2p_ticks[min(stage, other)] if placement.is_remote(stage, which) else 0
        there = (op_of[other, kind], ticks)
        return (there, *on(stage, R)) if kind is I and (stage, R) in op_of else (there,)

    return tuple(waits_for(stage, kind) for stage, kind in operations)


def _memory_delta(kind: Kind, activation: int, rest: int) -> int:
    """Return the memory that a pass acquires, or, if negative, frees, without recompute."""
    return {F: activation, R: 0, I: rest - activation, W: -rest}[kind]


def _memory(problem: Problem, with_recompute: bool) -> tuple[list[int], list[int], list[int], int]:
    """Return the memory of a microbatch on each stage, and a rank's limit, in whole units.

    The unit is a share of a chunk, or a byte. The memory is that from F to I, that from I to W, and
    that of the input, which is stored if the activation is recomputed. The limit is rounded down,
    and is at most the memory of all microbatches. The gradients of keys and values, which a stage
    holds for one sliced microbatch at a time, are subtracted from the limit.
    """
    limit, placement = problem.memory_limit, problem.placement
    chunk = (
        round(1 / INPUT_SHARE)
        if with_recompute
        else 1
        if problem.slices.count == 1
        else _SLICE_SHARES
    )
    stored = [1] * placement.stages
    if limit is not None and limit.bytes is not None:
        held = bytes_for(limit, problem.costs)
        activation, rest = (
            list(map(math.ceil, held[what])) for what in (Held.ACTIVATION, Held.WEIGHT_INPUTS)
        )
        amount = in_bytes(problem.costs)
        stored = [math.ceil(amount(Held.INPUT, stage)) for stage in range(placement.stages)]
        allowed: float = limit.bytes
        if problem.slices.count > 1:
            keys_values = [amount(Held.KEYS_VALUES, stage) for stage in range(placement.stages)]
            allowed -= max(sum(keys_values[s] for s in row) for row in placement.stages_of)
    else:
        activation = rest = [chunk] * placement.stages
        allowed = math.inf
        if limit is not None:
            assert limit.microbatches is not None
            allowed = with_rounding(limit.microbatches * placement.chunks * chunk)
    most = problem.microbatches * max(_microbatch_memory(problem, activation, rest))
    return activation, rest, stored, most if allowed >= most else int(allowed)


def _microbatch_memory(
    problem: Problem, activation: Sequence[int], rest: Sequence[int]
) -> list[int]:
    """Return the memory of one microbatch on each rank, with each slice rounded up.

    This is `JobShop.microbatch_memory`.
    """
    rounding = problem.slices.count - 1
    return [
        sum(max(activation[stage], rest[stage]) + rounding for stage in stages)
        for stages in problem.placement.stages_of
    ]


def _tails(problem: Problem, tick: float) -> tuple[int, ...]:
    """Return for each rank the time that must follow its last end (`JobShop.tails`).

    If steps overlap, a rank that starts t sooner than the last rank to start must also end t
    sooner, so t is its tail. The largest sum of end and tail is then a constant plus the span.
    """
    placement, costs = problem.placement, problem.costs
    if not problem.options.steps_overlap:
        return (0,) * placement.ranks
    begins = [0.0]
    for stage, forward in enumerate(costs.seconds[Kind.FORWARD][:-1]):
        p2p = costs.p2p_seconds_behind(stage) if placement.is_remote(stage, Neighbour.NEXT) else 0.0
        begins.append(begins[-1] + forward + p2p)
    first = [begins[stages[0]] for stages in placement.stages_of]
    return tuple(round((max(first) - begin) / tick) for begin in first)


def rows_of(
    starts: Starts,
    placement: Placement,
    recompute_actions: npt.NDArray[np.bool_] | None = None,
    orders: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Rows:
    """Return the actions of each rank in the order of their ``starts`` in a packing problem.

    Args:
        recompute_actions: as `JobShop.recompute_actions`; None: there are no operations of R.
        orders: the microbatches or slices of the columns of F, and those of the columns of other
            operations (`Problem.orders`); None: whole microbatches.
    """
    operations, m = operations_of(placement, recompute_actions is not None), starts.shape[1]
    forwards, backwards = orders or (range(m), range(m))
    rows = []
    for of_rank in np.split(np.arange(len(operations)), placement.ranks):
        row = []
        for position in _by_start(starts[of_rank]).tolist():
            op, k = of_rank[0] + position // m, position % m
            stage, kind = operations[op]
            if kind is not R or (recompute_actions is not None and recompute_actions[op, k]):
                row.append(Action(stage, kind, forwards[k] if kind is F else backwards[k]))
        rows.append(tuple(row))
    return tuple(rows)


def recomputed_in(rows: Rows, stages: int, microbatches: int) -> npt.NDArray[np.bool_] | None:
    """Return, by stage and microbatch, whether a schedule's ``rows`` recompute the activation.

    None if they recompute nothing.
    """
    recomputed = np.zeros((stages, microbatches), dtype=bool)
    for stage, kind, k in (action for row in rows for action in row):
        if kind is R:
            recomputed[stage, k] = True
    return recomputed if recomputed.any() else None


def starts_of(rows: Sequence[Sequence[Action]], shop: JobShop) -> Starts:
    """Return the start ticks of the passes in a schedule's ``rows``, each as early as possible.

    B counts as I, then W. The memory limit is ignored, as a plan may come from a schedule that
    needs more.
    """
    return _timed(_orders_in(rows, shop), shop)


def timed(starts: Starts, shop: JobShop) -> Starts:
    """Return the earliest start ticks with which passes keep the order of ``starts`` on their rank.

    This is `starts_of` applied to `rows_of`.
    """
    assert shop.recompute_deltas is None
    orders = []
    for first in range(0, shop.operation_count, shop.operations_per_rank):
        order = _by_start(starts[first : first + shop.operations_per_rank])
        operations, columns = np.divmod(order, shop.columns)
        orders.append(list(zip((operations + first).tolist(), columns.tolist(), strict=True)))
    return _timed(orders, shop)


def _by_start(starts: Starts) -> npt.NDArray[np.intp]:
    """Return the positions of passes in the array ``starts``, sorted by start time.

    Positions are counted row by row.
    """
    return np.argsort(starts, axis=None, kind="stable")


# Order of each rank: operation and column (microbatch) of each of its passes.
Orders = list[list[tuple[int, int]]]


def _timed(orders: Orders, shop: JobShop) -> Starts:
    durations: list[list[int]] = shop.pass_durations.tolist()
    starts = [[_NOT_YET] * shop.columns for _ in shop.predecessors]
    predecessors, size = shop.predecessors_by_column, shop.operations_per_rank
    woken = [
        {other // size for other, _ in row} - {n // size} for n, row in enumerate(shop.successors)
    ]
    at, free = [0] * len(orders), list(shop.release_times)
    todo, queued = deque(range(len(orders))), [True] * len(orders)
    while todo:
        rank = todo.popleft()
        queued[rank] = False
        order = orders[rank]
        while at[rank] < len(order):
            op, k = order[at[rank]]
            start = free[rank]
            for other, p2p_ticks, columns in predecessors[op]:
                begun = starts[other][columns[k]]
                if begun == _NOT_YET:
                    start = _NOT_YET
                    break
                start = max(start, begun + durations[other][columns[k]] + p2p_ticks[k])
            if start == _NOT_YET:
                break
            starts[op][k], free[rank] = start, start + durations[op][k]
            at[rank] += 1
            for waiting in woken[op]:
                if not queued[waiting]:
                    queued[waiting] = True
                    todo.append(waiting)
    assert all(n == len(order) for n, order in zip(at, orders, strict=True)), "rows would hang"
    return np.array(starts, dtype=np.int64)


def _orders_in(rows: Sequence[Sequence[Action]], shop: JobShop) -> Orders:
    """Return the operation and column of each pass in the ranks' ``rows`` of a schedule.

    An R that is no action of its own follows directly after its F.
    """
    op_of = {key: op for op, key in enumerate(shop.operations)}
    actions = action_arrays_of(rows)
    of_pairs = np.full((len(actions.stage_kinds), 2), _NONE)
    for row, (stage, kind) in zip(of_pairs, actions.stage_kinds, strict=True):
        parts = RULES[kind].covers
        if shop.recompute_deltas is not None and kind is F:
            parts = (F, R)
        row[: len(parts)] = [op_of[stage, part] for part in parts]
    operations, pieces = of_pairs[actions.stage_kind], actions.microbatch[:, None]
    opposite = np.array(shop.opposite_columns)[pieces]
    columns = np.where(np.array(shop.is_forward)[operations], pieces, opposite)
    is_there = operations != _NONE
    if shop.recompute_deltas is not None:
        there = np.zeros((shop.operation_count, shop.columns), dtype=bool)
        there[operations[:, 0], columns[:, 0]] = True
        is_recompute = np.array([kind is R for _, kind in shop.operations])
        behind_f = is_there[:, 1] & is_recompute[operations[:, 1]]
        is_there[behind_f, 1] = ~there[operations[behind_f, 1], columns[behind_f, 1]]
    passes = list(zip(operations[is_there].tolist(), columns[is_there].tolist(), strict=True))
    lengths = np.bincount(actions.rank, is_there.sum(axis=1), len(rows))
    bounds = np.cumsum([0, *lengths], dtype=int).tolist()
    return [passes[begin:end] for begin, end in pairwise(bounds)]


def end_of(starts: Starts, shop: JobShop) -> int:
    """Return the tick at which all passes with these ``starts`` have ended, tails included."""
    ends = (starts + shop.pass_durations).max(axis=1)
    of_ranks = ends.reshape(shop.placement.ranks, shop.operations_per_rank).max(axis=1)
    return int((of_ranks + np.array(shop.tails)).max())
