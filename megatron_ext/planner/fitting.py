"""One schedule for a model: built, simulated, and made to fit into a rank's memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace

from megatron_ext.compile.build import keeping_proofs
from megatron_ext.compile.long_step import simulate_step
from megatron_ext.planner.candidate import (
    Candidate,
    RankMemory,
    Variant,
    VocabMethod,
    by_time,
)
from megatron_ext.planner.limits import least_time, limit_left
from megatron_ext.schedule.problem import Extras, Offload, Recompute
from megatron_ext.words import bytes_text


def consider(
    variant: Variant,
    method: VocabMethod,
    room: float | None = None,
    may_offload: bool = False,
    at_most: float = math.inf,
) -> Candidate:
    """Build and simulate ``variant``, within its memory limit and ``room`` bytes.

    If it does not fit, and may use offload or recompute, the faster one is used. A schedule that
    chooses itself what to recompute is also tried with recompute if memory costs it time. If
    overlapped passes are requested, it is tried with and without.

    Without a limit, the schedule is made for the memory that the model leaves of ``room``, which
    some families use.

    Args:
        at_most: a schedule that does not fit is not made to fit if it takes more seconds.

    Raises:
        ValueError: the schedule cannot be made so.
    """
    with keeping_proofs():
        if not variant.problem.extras.pairs:
            return _consider(variant, method, room, may_offload, at_most)
        alone = replace(variant, problem=variant.problem.with_extras(pairs=False))
        made: list[Candidate] = []
        with contextlib.suppress(ValueError):
            made.append(_without_offload(variant, method, room))
        try:
            made.insert(0, _consider(alone, method, room, may_offload, at_most))
        except ValueError:  # in pairs the order is another, and may hold less
            if not made:
                raise
        return min(made, key=by_time)


def _consider(
    variant: Variant, method: VocabMethod, room: float | None, may_offload: bool, at_most: float
) -> Candidate:
    limit = variant.problem.memory_limit or limit_left(variant, room)
    made: list[Candidate] = []
    refusal: ValueError | None = None
    try:
        made.append(_without_offload(variant, method, room))
    except TooFull as error:
        if error.step > at_most:
            raise
        refusal = error
    except ValueError as error:
        refusal = error
    if limit is not None and (refusal or _is_slowed_by_memory(variant, made[0])):
        for extras in _ways_to_fit(variant, may_offload and refusal is not None):
            with contextlib.suppress(ValueError):
                fitting = replace(variant.problem, memory_limit=limit, extras=extras)
                candidate = _candidate(replace(variant, problem=fitting), method)
                _check_room(candidate, room)
                made.append(candidate)
    if not made:
        assert refusal is not None
        raise refusal
    return min(made, key=by_time)


SLOWED = 1.1  # times what any schedule would take without a limit


def _is_slowed_by_memory(variant: Variant, made: Candidate) -> bool:
    """Return whether ``made`` may well be shorter with more recompute."""
    if not (variant.may_recompute and variant.choice.traits.fits_recompute):
        return False
    unlimited = replace(variant.problem, memory_limit=None)
    return made.step > SLOWED * least_time(unlimited, variant.choice.traits.splits_backward)


def _ways_to_fit(variant: Variant, may_offload: bool) -> Iterator[Extras]:
    """Yield the options with which a variant may fit into its memory limit."""
    problem = variant.problem
    if may_offload and problem.costs.host is not None:
        yield replace(problem.extras, activation_offload=Offload.FIT)
    if variant.may_recompute:
        yield replace(problem.extras, recompute=Recompute(fit=True))


def _without_offload(variant: Variant, method: VocabMethod, room: float | None) -> Candidate:
    left = limit_left(variant, room)
    if left is not None and variant.problem.memory_limit is None:
        # One limit is for all ranks, and the fullest may be one that holds little.
        with contextlib.suppress(ValueError):
            return _candidate(
                replace(variant, problem=replace(variant.problem, memory_limit=left)), method
            )
    made = _candidate(variant, method)
    _check_room(made, room)
    return made


class TooFull(ValueError):
    """Refusal of a schedule that does not fit, and would take ``step`` if it did."""

    def __init__(self, message: str, step: float) -> None:
        super().__init__(message)
        self.step = step


def _check_room(made: Candidate, room: float | None) -> None:
    """Raise TooFull if a rank would hold more than ``room``."""
    if room is None or made.memory is None:
        return
    totals = [rank.total for rank in made.memory]
    fullest = max(totals)
    if fullest > room:
        raise TooFull(
            f"rank {totals.index(fullest)} would hold {bytes_text(fullest)}, "
            f"{bytes_text(fullest - room)} more than it may",
            made.step,
        )


_KEPT: ContextVar[dict[str, Candidate] | None] = ContextVar("kept", default=None)


@contextlib.contextmanager
def keeping_candidates() -> Iterator[None]:
    """Build and simulate each problem only once in the block."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def _candidate(variant: Variant, method: VocabMethod) -> Candidate:
    kept = _KEPT.get()
    if kept is None:
        return _made(variant, method)
    choice = variant.choice
    key = repr((choice.spec, choice.takes_long, variant.problem, variant.model, method))
    if key not in kept:
        kept[key] = _made(variant, method)
    return replace(kept[key], variant=variant)


def _made(variant: Variant, method: VocabMethod, *, whole: bool = False) -> Candidate:
    step = simulate_step(variant.choice, variant.problem, variant.build, whole=whole)
    memory = None
    if variant.model is not None and step.held_bytes is not None:
        memory = tuple(map(RankMemory, variant.model, step.held_bytes))
    limit = variant.problem.memory_limit
    return Candidate(method, step.report, variant, limit, memory, step.is_whole)


def built_whole(candidate: Candidate, room: float | None = None) -> Candidate:
    """Return ``candidate`` with the figures of all its microbatches, instead of those that its
    repeating part tells.

    Raises:
        ValueError: its schedule cannot be made after all, or takes more than ``room`` bytes.
    """
    if candidate.is_whole:
        return candidate
    with keeping_proofs():
        whole = _made(candidate.variant, candidate.method, whole=True)
    _check_room(whole, room)
    return whole
