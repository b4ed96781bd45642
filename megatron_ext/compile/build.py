"""Construction of a program: family, transforms, proof.

    Problem -> family -> passes -> transforms -> Schedule -> prove -> Program

`build_program` goes all the way, `complete` begins with passes, and `prove_built` only proves.
Features take part by their hooks (`build_hooks`): in the costs, in what the family sees, in the
memory limit of its passes, and in the actions inserted before and after the messages.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import override

from megatron_ext.base.garbage import uncollected
from megatron_ext.base.progress import task
from megatron_ext.compile.build_hooks import Construction
from megatron_ext.compile.features import build_hooks_of
from megatron_ext.compile.program.communication import communicate
from megatron_ext.compile.program.memory import bytes_for, in_bytes, peaks
from megatron_ext.compile.program.message_order import order_messages
from megatron_ext.compile.program.verify import Program, check_compute, prove, within_limit
from megatron_ext.compile.program.waits import await_sends
from megatron_ext.compile.registry import ResolvedSpec, entries
from megatron_ext.compile.size import check_size, problem_size
from megatron_ext.compile.transforms.omitted_backward import (
    drop_frozen_prefix,
    keep_forward,
    without_backward,
)
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule, Transform

_TRIES = 4  # number of tries to subtract the memory of messages from the limit of the passes


def build_program(resolved: ResolvedSpec, problem: Problem) -> Program:
    """Return the proved program of the schedule ``resolved`` for ``problem``.

    The costs of the program's own problem may differ from those given: features such as vocabulary
    parallelism change them, and if the first stages have nothing to train, these stages have no
    backward passes.

    Raises:
        InvalidSchedule: the schedule does not solve the problem, or not within its memory limit.
        ValueError: this machine has too little memory to build so large a program.
    """
    # The first checks refuse a problem before any schedule is made.
    check_size(problem)
    _check_slices(resolved, problem)
    features = build_hooks_of(problem)
    for feature in features:
        feature.check(resolved, problem)
    construction = _Construction(resolved, _with_own_costs(problem), _PROOFS.get() is not None)
    with (
        task(f"building {resolved.spec} for {problem_size(problem)}"),
        uncollected(),
        caching_proofs(),
    ):
        # A feature may construct the whole program itself, for instance the program of a long step.
        for feature in features:
            if (program := feature.program(construction)) is not None:
                return program
        # Usually the family makes the passes, transforms insert the other actions, and the result
        # is proved.
        passes, schedule = construction.within_limit()
        return _proof(passes, construction.problem, schedule)


def prove_built(schedule: Schedule, problem: Problem) -> Program:
    """Prove a ``schedule`` that `build_program` has made in another process; return its program.

    Args:
        problem: the problem of that program, with its own costs.

    Raises:
        InvalidSchedule: the schedule does not solve the problem, or not within its memory limit.
    """
    with uncollected():
        return prove(schedule, problem)


def complete(schedule: Schedule, problem: Problem) -> Program:
    """Insert messages and waits into a schedule of compute actions; return the proved program.

    The problem's costs are changed as by `build_program`.

    Raises:
        InvalidSchedule: the schedule does not solve the problem, or not within its memory limit.
    """
    problem = _with_own_costs(problem)
    for feature in build_hooks_of(problem):
        schedule = feature.completed(schedule, problem)
    _check_passes(schedule, problem)
    return _proof(schedule, problem)


@dataclass(frozen=True)
class _Construction(Construction):
    """Construction of a program for a ``problem``, by the functions of this module."""

    @override
    def passes(self, limit: MemoryLimit | None) -> Schedule:
        alone, features = self.problem, build_hooks_of(self.problem)
        # Features change the problem that is given to the family, for instance its costs.
        for feature in features:
            alone = feature.for_family(self.resolved, alone)
        alone = replace(alone, memory_limit=limit, first_trained_stage=0)
        # The family runs within the contexts of the features that change its passes.
        family = self.resolved.build
        for feature in features:
            family = partial(feature.made, self.resolved, family)
        schedule = family(alone)
        _check_passes(schedule, self.problem)
        return schedule

    @override
    def passes_within_limit(self) -> Schedule:
        return self.within_limit()[0]

    @override
    def transformed(self, passes: Schedule, limit: MemoryLimit | None) -> Schedule:
        return _transformed(passes, replace(self.problem, memory_limit=limit))

    @override
    def proved(self, passes: Schedule) -> Program:
        return _proof(passes, self.problem)

    @override
    def of(self, resolved: ResolvedSpec, problem: Problem) -> Construction:
        return replace(self, resolved=resolved, problem=problem)

    def within_limit(self) -> tuple[Schedule, Schedule | None]:
        """Return the family's passes within the memory limit.

        The second result is the same passes with messages and inserted actions, if these have been
        made to measure memory; else None.
        """
        limit = self._limit_of_passes()
        passes, schedule = self.passes(limit), None
        if limit is not None and limit.bytes is not None:
            passes, schedule = self._with_memory_for_messages(limit.bytes, passes)
        return passes, schedule

    def _limit_of_passes(self) -> MemoryLimit | None:
        """Return the memory limit of the family's passes.

        This is the problem's limit, less the additional memory of features. None in an evaluation,
        which stores nothing for a backward pass.
        """
        limit = self.problem.memory_limit
        if limit is None or self.problem.forward_only:
            return None
        for feature in build_hooks_of(self.problem):
            limit = feature.limit_of_passes(limit, self.problem)
        return limit

    def _with_memory_for_messages(
        self, allowed: int, passes: Schedule
    ) -> tuple[Schedule, Schedule]:
        """Return passes that leave enough memory for their messages, and the transformed schedule.

        If messages bring ``passes`` over the memory limit, the family makes other passes that hold
        less, by the excess. If there are no such passes, ``passes`` are returned, so that `prove`
        says how much memory they need.

        Args:
            allowed: bytes that passes may hold.
        """
        problem, limit = self.problem, self.problem.memory_limit
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
                made = self.passes(MemoryLimit(bytes=allowed))
            except ValueError:
                break
            if made != smaller:  # a family that cannot lower its memory returns the same passes
                smaller, schedule = made, _transformed(made, problem)
        return first


_PROOFS: ContextVar[deque[tuple[Schedule, Program]] | None] = ContextVar("kept", default=None)
_PROGRAMS = 2  # number of programs in the cache; programs are large


@contextlib.contextmanager
def caching_proofs() -> Iterator[None]:
    """Cache the latest proved programs in the block.

    A search proves its result before `build_program` does, and several memory limits often give the
    same schedule.
    """
    if _PROOFS.get() is not None:
        yield
        return
    token = _PROOFS.set(deque(maxlen=_PROGRAMS))
    try:
        yield
    finally:
        _PROOFS.reset(token)


def _proof(passes: Schedule, problem: Problem, schedule: Schedule | None = None) -> Program:
    """Return the proved program of ``passes``, from the cache if the same passes were proved
    before.

    ``schedule`` are the same passes with messages and inserted actions, if these exist already.
    """
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
    """Return the cached program of ``passes``, even if made under another memory limit; else
    None."""
    if _limit_inserts(problem):
        return None
    for known, program in _PROOFS.get() or ():
        limit = program.problem.memory_limit
        if known == passes and program.problem == replace(problem, memory_limit=limit):
            return program
    return None


def _limit_inserts(problem: Problem) -> bool:
    """Return whether the actions that transforms insert (such as R) depend on the memory limit."""
    return any(feature.inserts_by_limit for feature in build_hooks_of(problem))


def _check_slices(resolved: ResolvedSpec, problem: Problem) -> None:
    if problem.slices.count > 1 and not resolved.traits.takes_slices:
        others = [name for name, entry in entries().items() if entry.traits.takes_slices]
        raise ValueError(
            f"schedule {resolved.spec} cannot cut sequences into {problem.slices.count} slices; "
            f"take one of the schedules {', '.join(others)}, or drop --pipeline-slices"
        )


def _with_own_costs(problem: Problem) -> Problem:
    """Return ``problem`` with costs adapted to stages without training and to features that
    are on."""
    if problem.first_trained_stage:
        costs = without_backward(problem.costs, problem.first_trained_stage)
        problem = replace(problem, costs=costs)
    for feature in build_hooks_of(problem):
        problem = feature.with_own_costs(problem)
    return problem


def _transformed(schedule: Schedule, problem: Problem) -> Schedule:
    """Return a schedule of compute actions with all inserted actions: messages, waits, copies."""
    features = build_hooks_of(problem)
    transforms: list[Transform] = []
    # The first transforms insert the passes of features.
    for feature in features:
        transforms += feature.before_messages(problem)
    if problem.forward_only:
        transforms.append(keep_forward)
    # The next transforms insert sends, receives, and the waits for sends.
    transforms += [communicate, order_messages, await_sends]
    if problem.first_trained_stage and not problem.forward_only:
        transforms.append(drop_frozen_prefix)
    # The last transforms insert features' copies to the host and messages that are sent once a
    # step.
    for feature in features if not problem.forward_only else ():
        transforms += feature.after_messages(problem)
    for transform in transforms:
        schedule = transform(schedule, problem)
    return schedule


def _check_passes(schedule: Schedule, problem: Problem) -> None:
    """Raise InvalidSchedule if the compute passes of a family do not solve ``problem``.

    The check includes the backward passes of untrained stages, which transforms remove later.
    """
    alone = problem
    for feature in build_hooks_of(problem):
        alone = feature.without(alone)
    check_compute(schedule, replace(alone, first_trained_stage=0, forward_only=False))
