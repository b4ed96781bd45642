"""Construction of a program from a choice or a schedule: family, transforms, proof."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial

from megatron_ext.compile.pairs import built_with_pairs, check_pairs, with_pairs
from megatron_ext.compile.program.communication import communicate
from megatron_ext.compile.program.memory import bytes_for, in_bytes, peaks, without_reserved
from megatron_ext.compile.program.message_order import order_messages
from megatron_ext.compile.program.simulate import step_seconds
from megatron_ext.compile.program.verify import (
    OverLimit,
    Program,
    check_compute,
    prove,
    within_limit,
)
from megatron_ext.compile.program.waits import await_sends
from megatron_ext.compile.registry import ResolvedSpec, entries
from megatron_ext.compile.size import check_size, problem_size
from megatron_ext.compile.transforms.offload import offload
from megatron_ext.compile.transforms.omitted_backward import (
    drop_frozen_prefix,
    keep_forward,
    without_backward,
)
from megatron_ext.compile.transforms.post_validation import validate_afterwards
from megatron_ext.compile.transforms.recompute import recompute
from megatron_ext.compile.transforms.vocabulary import INTERVALS, divide_vocabulary
from megatron_ext.compile.transforms.vocabulary_costs import share_vocabulary
from megatron_ext.garbage import uncollected
from megatron_ext.progress import task
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Offload, Problem, Recompute, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule, Transform

_TRIES = 4  # times that the memory of messages is subtracted from that of passes
_STEP = 0.05  # least share of the passes' memory that is subtracted at a time
_NOT_MUCH_LESS = 0.8  # times what a schedule needs: lower end of the search for a sufficient limit
_LOOSER = (3.0, 2.0, 1.5, 1.25, 1.0)  # factors of the memory limit for families, see _looser_limits


def build_program(resolved: ResolvedSpec, problem: Problem) -> Program:
    """Return the proved program of ``resolved`` for ``problem``.

    The costs of the program's own problem may differ: with vocabulary parallelism they have a
    partitioned vocabulary, and if the first stages have nothing to train, no backward passes of
    these.

    Raises:
        InvalidSchedule: the schedule does not solve the problem, or not within its memory limit.
        ValueError: this machine has too little memory to build so large a program.
    """
    check_size(problem)
    _check_slices(resolved, problem)
    check_pairs(resolved, problem)
    problem = _with_own_costs(problem)
    with task(f"building {resolved.spec} for {problem_size(problem)}"), uncollected():
        if _adds_recompute(resolved, problem) and not problem.forward_only:
            return _shortest_with_recompute(resolved, problem)
        with caching_proofs():
            if problem.options.activation_offload is not Offload.NONE and not problem.forward_only:
                return _first_with_offload(resolved, problem)
            return _proof(*_made(resolved, problem))


def prove_built(schedule: Schedule, problem: Problem) -> Program:
    """Return the program of a ``schedule`` that `build_program` has made in another process.

    Args:
        problem: the problem of that program, with its own costs.

    Raises:
        InvalidSchedule: as `prove`.
    """
    with uncollected():
        return prove(schedule, problem)


def _made(resolved: ResolvedSpec, problem: Problem) -> tuple[Schedule, Problem, Schedule | None]:
    """Return the family's passes within the memory limit, the problem, and the same passes
    transformed, if they are."""
    limit = _limit_of_passes(resolved, problem)
    passes, schedule = _compute(resolved, problem, limit), None
    if limit is not None and limit.bytes is not None:
        passes, schedule = _with_memory_for_messages(resolved, problem, limit.bytes, passes)
    return passes, problem, schedule


def _first_with_offload(resolved: ResolvedSpec, problem: Problem) -> Program:
    """Return the program of the first passes that fit into the memory limit with copies to the
    host. The family makes its passes within looser limits than the problem's, the loosest first,
    and at last those that fit without copies.

    Raises:
        OverLimit: none of them fits.
        ValueError: the family has none.
    """
    without = problem.with_options(activation_offload=Offload.NONE)
    limits = _looser_limits(problem)
    makers: list[Callable[[], Schedule]] = [partial(_compute, resolved, problem, x) for x in limits]
    if problem.memory_limit is not None:
        makers.append(lambda: _made(resolved, without)[0])
    tried: set[Schedule] = set()
    refusals: list[ValueError] = []
    for make in makers:
        try:
            passes = make()
            if passes not in tried:
                tried.add(passes)
                return _proof(passes, problem)
        except ValueError as error:
            refusals.append(error)
    raise refusals[0]


_PROOFS: ContextVar[deque[tuple[Schedule, Program]] | None] = ContextVar("kept", default=None)
_PROGRAMS = 2  # they are large


@contextlib.contextmanager
def caching_proofs() -> Iterator[None]:
    """Cache the latest proofs in the block: a search proves its result before `build_program` does,
    and several memory limits often give the same schedule."""
    if _PROOFS.get() is not None:
        yield
        return
    token = _PROOFS.set(deque(maxlen=_PROGRAMS))
    try:
        yield
    finally:
        _PROOFS.reset(token)


def _proof(passes: Schedule, problem: Problem, schedule: Schedule | None = None) -> Program:
    """Return the program of ``passes``. ``schedule`` are the same passes already transformed, if
    they are."""
    program = _cached(passes, problem)
    if program is not None:
        return within_limit(program, problem)
    if schedule is None:
        schedule = _transformed(passes, problem)
    proofs = _PROOFS.get()
    if proofs is None or _limit_inserts(problem):
        return prove(schedule, problem)
    program = prove(schedule, replace(problem, memory_limit=None))
    proofs.append((passes, program))
    program = within_limit(program, problem)
    proofs[-1] = passes, program
    return program


def _cached(passes: Schedule, problem: Problem) -> Program | None:
    """Return the program of ``passes`` from the cache, even with another memory limit; None if it
    is not there."""
    if _limit_inserts(problem):
        return None
    for known, program in _PROOFS.get() or ():
        limit = program.problem.memory_limit
        if known == passes and program.problem == replace(problem, memory_limit=limit):
            return program
    return None


def _limit_inserts(problem: Problem) -> bool:
    """Return whether the inserted actions depend on the memory limit."""
    options = problem.options
    return options.activation_offload is not Offload.NONE or options.recompute != Recompute()


def _check_slices(resolved: ResolvedSpec, problem: Problem) -> None:
    if problem.slices.count > 1 and not resolved.traits.takes_slices:
        others = [name for name, entry in entries().items() if entry.traits.takes_slices]
        raise ValueError(
            f"schedule {resolved.spec} has no order for {problem.slices.count} slices of a "
            f"microbatch; take one of {', '.join(others)}, or no slices"
        )


def _shortest_with_recompute(resolved: ResolvedSpec, problem: Problem) -> Program:
    """Return the shortest program that fits into the memory limit with recompute. The family makes
    its passes within looser limits than the problem's, and recompute reduces their memory.

    Raises:
        OverLimit: none of them fits. It names a sufficient limit.
    """
    if resolved.traits.searches and problem.slices.count > 1:
        resolved = resolved.without_search  # not a search for each limit
    programs, refusals = _with_recompute(resolved, problem)
    if programs:
        return min(programs, key=lambda program: step_seconds(program, problem.costs))
    # A family may refuse a limit that recompute would meet, as it does not know of recompute.
    over = [error for error in refusals if isinstance(error, OverLimit)]
    if problem.memory_limit is None or not over:
        raise refusals[-1]
    if _PROOFS.get() is not None:
        raise over[0]  # many schedules are compared: the least limit is not shown
    least = _least_that_is_enough(resolved.without_search, problem, problem.memory_limit, over)
    raise over[0].naming(least, problem.memory_limit)


def _with_recompute(
    resolved: ResolvedSpec, problem: Problem
) -> tuple[list[Program], list[ValueError]]:
    """Build the family's passes within each looser limit, and return the programs and the refusals.
    The first of these is for the passes without a limit, if they can be made."""
    tried: set[Schedule] = set()
    programs: list[Program] = []
    refusals: list[ValueError] = []
    for limit in _looser_limits(problem):
        try:
            passes = _compute(resolved, problem, limit)
            if passes not in tried:
                tried.add(passes)
                programs.append(_proved_in_bytes(passes, problem))
        except ValueError as error:
            refusals.append(error)
    return programs, refusals


def _least_that_is_enough(
    resolved: ResolvedSpec, problem: Problem, limit: MemoryLimit, over: Sequence[OverLimit]
) -> float:
    """Return the least sufficient memory limit that a few tries find. ``limit`` is not sufficient.

    The need of the passes that are made without a limit is sufficient, as these are tried within
    each limit. Less may suffice: within another limit the family makes another order, and other
    passes are recomputed.
    """
    enough = over[0].least
    too_little = max(limit.amount, _NOT_MUCH_LESS * min(error.least for error in over))
    next_try = min(error.least for error in over)
    for _ in range(_TRIES):
        if not too_little < next_try < enough:
            next_try = (too_little + enough) / 2
        candidate = limit.of(math.ceil(next_try) if limit.bytes is not None else next_try)
        programs, _ = _with_recompute(resolved, replace(problem, memory_limit=candidate))
        if programs:
            enough = candidate.amount
        else:
            too_little = candidate.amount
    return enough


def _looser_limits(problem: Problem) -> list[MemoryLimit | None]:
    """Return the memory limits to give the family before copies or recompute, the loosest first."""
    limit = problem.memory_limit
    if limit is None:
        return [None]
    return [None, *map(limit.scaled, _LOOSER)]


def _proved_in_bytes(passes: Schedule, problem: Problem) -> Program:
    """Return the program of ``passes``. If messages bring it over a limit in bytes, recompute gets
    a limit that is smaller by the excess.

    Raises:
        InvalidSchedule: as `prove`.
    """
    limit = problem.memory_limit
    schedule = _transformed(passes, problem)
    if limit is None or limit.bytes is None:
        return prove(schedule, problem)
    bytes_for(limit, problem.costs)
    allowed = limit.bytes
    for _ in range(2 * _TRIES):
        over = max(peaks(schedule, in_bytes(problem.costs))) - limit.bytes
        if over <= 0:
            break
        allowed -= math.ceil(max(over, _STEP * allowed))  # recompute frees large pieces
        if allowed <= 0:
            break
        within = replace(problem, memory_limit=MemoryLimit(bytes=allowed))
        schedule = _transformed(passes, within)
    return prove(schedule, problem)


def complete(schedule: Schedule, problem: Problem) -> Program:
    """Return the proved program of ``schedule``, which has compute actions only, for ``problem``.

    Its costs are changed as by `build_program`.

    Raises:
        InvalidSchedule: the schedule does not solve the problem, or not within its memory limit.
    """
    problem = _with_own_costs(problem)
    schedule = with_pairs(schedule, problem)
    _check_passes(schedule, problem)
    return _proof(schedule, problem)


def _with_own_costs(problem: Problem) -> Problem:
    """Return ``problem`` with its costs adapted to frozen stages and vocabulary parallelism."""
    costs = problem.costs
    if problem.first_trained_stage:
        costs = without_backward(costs, problem.first_trained_stage)
    if problem.options.vocab_parallel is not VocabularyParallel.NONE:
        costs = share_vocabulary(costs, problem.placement, problem.options.vocab_parallel)
    return replace(problem, costs=costs)


def _transformed(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule``, which has compute actions only, with all inserted actions."""
    transforms: list[Transform] = [communicate, order_messages, await_sends]
    if problem.options.vocab_parallel is not VocabularyParallel.NONE:
        transforms.insert(0, divide_vocabulary)
    if problem.forward_only:
        transforms.insert(transforms.index(communicate), keep_forward)
    elif problem.options.recompute != Recompute():
        transforms.insert(transforms.index(communicate), recompute)
    if not problem.forward_only:
        transforms += _for_training(problem)
    for transform in transforms:
        schedule = transform(schedule, problem)
    return schedule


def _for_training(problem: Problem) -> list[Transform]:
    transforms: list[Transform] = [drop_frozen_prefix] if problem.first_trained_stage else []
    if problem.options.activation_offload is not Offload.NONE:
        transforms.append(offload)
    elif problem.options.steps_overlap:
        transforms.append(validate_afterwards)
    return transforms


def _places_recompute(resolved: ResolvedSpec, problem: Problem) -> bool:
    """Return whether the family itself chooses the activations to recompute."""
    is_uncut = problem.slices.count == 1  # a search of slices recomputes none
    return resolved.traits.fits_recompute and problem.options.recompute.fit and is_uncut


def _adds_recompute(resolved: ResolvedSpec, problem: Problem) -> bool:
    """Return whether recompute is added to the family's passes afterwards."""
    is_requested = problem.options.recompute != Recompute()
    return is_requested and not _places_recompute(resolved, problem)


def _limit_of_passes(resolved: ResolvedSpec, problem: Problem) -> MemoryLimit | None:
    """Return the memory limit of the family's passes: the problem's, less the additional memory of
    vocabulary parallelism. None with recompute, whose savings are not known yet, and in an
    evaluation, which holds nothing for a backward pass."""
    if problem.forward_only or _adds_recompute(resolved, problem):
        return None
    limit = problem.memory_limit
    if limit is not None and problem.options.vocab_parallel is not VocabularyParallel.NONE:
        limit = without_reserved(limit, INTERVALS[problem.options.vocab_parallel], problem)
    return limit


def _with_memory_for_messages(
    resolved: ResolvedSpec, problem: Problem, allowed: int, passes: Schedule
) -> tuple[Schedule, Schedule]:
    """Return passes that leave enough memory for their messages, and the same passes transformed.
    If messages bring ``passes`` over the memory limit, the family makes others that hold less by
    the excess.

    If there are no such passes, ``passes`` are returned, so that `prove` says how much they need.

    Args:
        allowed: bytes that passes may hold.
    """
    limit = problem.memory_limit
    assert limit is not None and limit.bytes is not None
    bytes_for(limit, problem.costs)
    known = _cached(passes, problem)
    first = passes, _transformed(passes, problem) if known is None else known.schedule
    smaller, schedule = first
    for _ in range(_TRIES):
        over = max(peaks(schedule, in_bytes(problem.costs))) - limit.bytes
        if over <= 0:
            return smaller, schedule
        allowed -= math.ceil(over)
        try:
            made = _compute(resolved, problem, MemoryLimit(bytes=allowed))
        except ValueError:
            break
        if made != smaller:  # not all families can do with less
            smaller, schedule = made, _transformed(made, problem)
    return first


def _compute(resolved: ResolvedSpec, problem: Problem, limit: MemoryLimit | None) -> Schedule:
    """Return the compute actions that the family makes within ``limit``."""
    alone = replace(_for_family(problem), memory_limit=limit)
    if _places_recompute(resolved, problem):
        alone = alone.with_options(recompute=problem.options.recompute)
    schedule = built_with_pairs(resolved, alone, alone.with_options(pairs=problem.options.pairs))
    _check_passes(schedule, problem)
    return schedule


def _check_passes(schedule: Schedule, problem: Problem) -> None:
    alone = replace(_for_family(problem), forward_only=False)
    check_compute(schedule, alone.with_options(pairs=problem.options.pairs))


def _for_family(problem: Problem) -> Problem:
    """Return ``problem`` as a family sees it: without the options that transforms add, and with the
    stages that they remove."""
    alone = problem.with_options(
        vocab_parallel=VocabularyParallel.NONE,
        activation_offload=Offload.NONE,
        recompute=Recompute(),
        pairs=False,
    )
    return replace(alone, first_trained_stage=0)
