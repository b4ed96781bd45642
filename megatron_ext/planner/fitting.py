"""One schedule for a model: built, simulated, and made to fit into a rank's memory.

A schedule that needs too much memory is not lost: offload or recompute may make it fit, at a price
in time that only a simulation tells. Long steps are simulated with fewer microbatches, and their
figures derived from the part that repeats.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace

from megatron_ext.base.words import bytes_text
from megatron_ext.compile.build import caching_proofs
from megatron_ext.compile.long_step import HoldsMore, Simulated, simulate_step
from megatron_ext.planner.candidate import (
    Candidate,
    RankMemory,
    Variant,
    VocabMethod,
    by_time,
)
from megatron_ext.planner.limits import least_time, limit_left
from megatron_ext.schedule.problem import Offload, Recompute, ScheduleOptions


def consider(
    variant: Variant,
    method: VocabMethod,
    allowed_bytes: float | None = None,
    may_offload: bool = False,
    at_most: float = math.inf,
) -> Candidate:
    """Build and simulate the schedule ``variant`` within its memory limit and ``allowed_bytes``.

    If the schedule does not fit, offload and recompute are tried, if they are allowed, and the
    fastest result is returned. If the memory limit makes the schedule slow, it is also tried with
    offload, and with recompute if the family chooses the recomputed activations itself. If
    overlapped passes are requested, the schedule is also tried without them.

    If the problem has no memory limit, the limit is what the model's parameters, gradients and
    optimizer states leave of ``allowed_bytes``. Some families order passes differently under a
    limit.

    Args:
        allowed_bytes: bytes that each rank may take; None: any number.
        may_offload: whether activations may be copied to the host so that the schedule fits.
        at_most: seconds of a step. A schedule that does not fit and takes longer is refused without
            a try of offload or recompute.

    Raises:
        ValueError: the schedule cannot be built, or does not fit (`TooFull`).
    """
    with caching_proofs():
        if not variant.problem.options.pairs:
            return _consider(variant, method, allowed_bytes, may_offload, at_most)
        without_overlap = replace(variant, problem=variant.problem.with_options(pairs=False))
        candidates: list[Candidate] = []
        with contextlib.suppress(ValueError):
            candidates.append(_as_requested(variant, method, allowed_bytes))
        try:
            candidates.insert(
                0, _consider(without_overlap, method, allowed_bytes, may_offload, at_most)
            )
        except ValueError:
            # If the program without overlap cannot be made, the program with overlapped passes may
            # still fit, since its order differs.
            if not candidates:
                raise
        return min(candidates, key=by_time)


def _consider(
    variant: Variant,
    method: VocabMethod,
    allowed_bytes: float | None,
    may_offload: bool,
    at_most: float,
) -> Candidate:
    limit = variant.problem.memory_limit or limit_left(variant, allowed_bytes)
    candidates: list[Candidate] = []
    refusal: ValueError | None = None
    try:
        candidates.append(_as_requested(variant, method, allowed_bytes))
    except TooFull as error:
        if error.seconds > at_most:
            raise
        refusal = error
    except ValueError as error:
        refusal = error
    if limit is not None and (refusal or _is_slowed_by_memory(variant, candidates[0])):
        may_recompute = refusal is not None or variant.resolved.traits.fits_recompute
        for options in _options_to_fit(variant, may_offload, may_recompute):
            with contextlib.suppress(ValueError):
                fitting = replace(variant.problem, memory_limit=limit, options=options)
                candidate = _candidate(replace(variant, problem=fitting), method)
                check_bytes(candidate, allowed_bytes)
                candidates.append(candidate)
    if not candidates:
        assert refusal is not None
        raise refusal
    return min(candidates, key=by_time)


# Factor between a step and its lower bound without a memory limit. From this factor on the limit
# counts as slowing the step.
SLOWED = 1.1


def _is_slowed_by_memory(variant: Variant, candidate: Candidate) -> bool:
    """Return whether the step of a schedule would probably be shorter with more memory."""
    # Recompute and offload are left aside here: they may need a memory limit, and by themselves
    # shorten no step.
    stays = variant.problem.with_options(recompute=Recompute(), activation_offload=Offload.NONE)
    unlimited = replace(stays, memory_limit=None)
    return candidate.step > SLOWED * least_time(unlimited, variant.resolved.traits.splits_backward)


def _options_to_fit(
    variant: Variant, may_offload: bool, may_recompute: bool
) -> Iterator[ScheduleOptions]:
    """Yield the offload or recompute options with which a schedule may fit its memory limit."""
    problem = variant.problem
    if may_offload and problem.costs.host is not None:
        yield replace(problem.options, activation_offload=Offload.FIT)
    if may_recompute and variant.may_recompute:
        yield replace(problem.options, recompute=Recompute(fit=True))


def _as_requested(variant: Variant, method: VocabMethod, allowed_bytes: float | None) -> Candidate:
    """Return the schedule ``variant`` as a candidate, without additional offload or recompute.

    Raises TooFull if it needs more than ``allowed_bytes``, ValueError if it cannot be built.
    """
    left = limit_left(variant, allowed_bytes)
    if left is not None and variant.problem.memory_limit is None:
        # A schedule's memory limit holds for all ranks, and is what the model leaves free on its
        # fullest rank. If no schedule meets this limit, a schedule without one may still fit, since
        # the rank with the largest part of the model may store the fewest activations.
        with contextlib.suppress(ValueError):
            return _candidate(
                replace(variant, problem=replace(variant.problem, memory_limit=left)), method
            )
    try:
        candidate = _candidate(variant, method, allowed_bytes)
    except HoldsMore as error:
        raise TooFull(str(error), math.inf) from error
    check_bytes(candidate, allowed_bytes)
    return candidate


class TooFull(ValueError):
    """Refusal of a schedule that needs more memory than a rank has.

    Attributes:
        seconds: duration of a step under this schedule if memory were unlimited; inf: not known.
    """

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


def check_bytes(candidate: Candidate, allowed_bytes: float | None) -> None:
    """Raise TooFull if a rank would hold more than ``allowed_bytes`` under the plan's candidate."""
    if allowed_bytes is None or candidate.memory is None:
        return
    totals = [rank.total for rank in candidate.memory]
    fullest = max(totals)
    if fullest > allowed_bytes:
        raise TooFull(
            f"rank {totals.index(fullest)} would hold {bytes_text(fullest)}, "
            f"{bytes_text(fullest - allowed_bytes)} more than it may",
            candidate.step,
        )


_CACHE: ContextVar[dict[str, Candidate] | None] = ContextVar("candidates", default=None)


@contextlib.contextmanager
def caching_candidates() -> Iterator[None]:
    """Cache simulated candidates in the block, so that each problem is simulated only once."""
    token = _CACHE.set({})
    try:
        yield
    finally:
        _CACHE.reset(token)


def _candidate(
    variant: Variant, method: VocabMethod, allowed_bytes: float | None = None
) -> Candidate:
    """Return the schedule ``variant`` as a simulated candidate, from the cache if it is there."""
    cache = _CACHE.get()
    if cache is None:
        return _simulated(variant, method, allowed_bytes)
    resolved = variant.resolved
    key = repr((resolved.spec, resolved.takes_long, variant.problem, variant.model, method))
    if key not in cache:
        cache[key] = _simulated(variant, method, allowed_bytes)
    return replace(cache[key], variant=variant)


def _simulated(
    variant: Variant,
    method: VocabMethod,
    allowed_bytes: float | None = None,
    *,
    all_microbatches: bool = False,
) -> Candidate:
    """Build and simulate the schedule ``variant``, and return it as a candidate.

    ``all_microbatches`` is that of `simulate_step`.

    Raises:
        HoldsMore: a step that takes long to be built holds more than ``allowed_bytes`` on some
            rank.
    """
    most = None
    if allowed_bytes is not None and variant.model is not None:
        most = [allowed_bytes - rank.total for rank in variant.model]
    step = simulate_step(
        variant.resolved,
        variant.problem,
        variant.build,
        all_microbatches=all_microbatches,
        most=most,
    )
    return candidate_of(variant, method, step)


def candidate_of(variant: Variant, method: VocabMethod, step: Simulated) -> Candidate:
    """Return a plan's candidate made of the schedule ``variant`` and its simulated ``step``."""
    memory = None
    if variant.model is not None and step.held_bytes is not None:
        memory = tuple(map(RankMemory, variant.model, step.held_bytes))
    limit = variant.problem.memory_limit
    return Candidate(method, step.report, variant, limit, memory, step.has_all_microbatches)


def built_in_full(candidate: Candidate, allowed_bytes: float | None = None) -> Candidate:
    """Return a plan's candidate simulated with all microbatches of a step.

    Long steps are first simulated with fewer microbatches, and their figures derived from the part
    that repeats.

    Raises:
        ValueError: the whole schedule cannot be built, or takes more than ``allowed_bytes`` bytes.
    """
    if candidate.has_all_microbatches:
        return candidate
    with caching_proofs():
        built = _simulated(candidate.variant, candidate.method, all_microbatches=True)
    check_bytes(built, allowed_bytes)
    return built
