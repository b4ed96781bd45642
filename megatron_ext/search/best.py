"""The best schedule found for a problem, among known ones and by a search.

Every family of the placement is among the plans that the search starts from, even if it needs more
memory than the limit, as packing brings it within the limit. Families within the limit are also
candidates for the result, which is chosen by the simulated time of a step. If one of these families
reaches the lower bound of all schedules (`lower_bound`), nothing is searched.

The result is stored in the user's cache directory, by problem and effort.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_ext.compile.build import complete
from megatron_ext.compile.program.memory import bytes_for, in_bytes, limited_amount, peaks
from megatron_ext.compile.program.simulate import step_seconds
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import cut_as_in, on_placement
from megatron_ext.compile.size import check_table
from megatron_ext.compile.transforms.recompute import recompute
from megatron_ext.schedule.action import Action, Kind, Rows
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit, fits
from megatron_ext.schedule.problem import Problem, Recompute
from megatron_ext.schedule.schedule import Schedule, bitwise_order
from megatron_ext.schedule.schedule_csv import from_csv, to_csv
from megatron_ext.search import disk_cache
from megatron_ext.search.bounds import lower_bound
from megatron_ext.search.effort import LARGE, Effort, effort
from megatron_ext.search.extension import plans_from, with_middle
from megatron_ext.search.improve import first_plans, search
from megatron_ext.search.job_shop import (
    JobShop,
    Starts,
    end_of,
    job_shop_of,
    recomputed_in,
    rows_of,
    starts_of,
    timed,
)
from megatron_ext.search.pack import Packed
from megatron_ext.search.recompute_search import search_with_recompute


def best_schedule(name: str, problem: Problem) -> Schedule:
    """Return the best schedule that a search finds for ``problem``, or has found and stored before.

    ``name`` is the searching family. Without a memory limit, the limit is 1F1B's peak.

    Raises:
        ValueError: not even one microbatch at a time fits into the limit, or bytes are not known.
    """
    problem = _limited(problem)
    _check_limit(name, problem)
    # A stored result of a search with numba is used first, since such a search tries more and so is
    # better.
    stored = _stored(name, problem, LARGE)
    if stored is not None:
        return stored
    how = effort()
    stored = None if how.name == LARGE else _stored(name, problem, how.name)
    if stored is not None:
        return stored
    best = searched(name, problem, how)
    disk_cache.store(name, _key(problem, how.name), to_csv(best))
    return best


def best_known(name: str, problem: Problem) -> Schedule:
    """Return a good schedule without a search: the best of known schedules and their quick
    packings.

    Raises:
        ValueError: as `best_schedule`.
    """
    problem = _limited(problem)
    _check_limit(name, problem)
    if problem.options.recompute.fit:
        candidates = _recompute_candidates(_known_with_recompute(problem), problem)
    else:
        shop, known = job_shop_of(problem), _known(problem)
        starts = _starts_of_each(known, shop)
        candidates = _candidates(known, starts, shop)
        if shop.fits:
            candidates += _packed_candidates(first_plans(shop, starts), shop, problem)
            candidates.sort(key=lambda candidate: candidate.seconds)
    best = _best_of(name, candidates, problem)
    assert best is not None  # a step that runs one microbatch after the other always fits
    return _passes(name, best.program)


def _limited(problem: Problem) -> Problem:
    """Return ``problem`` with a memory limit (by default 1F1B's peak), and for training.

    An evaluation runs the forwards of the training schedule, so its search is the same.
    """
    limit = problem.memory_limit or MemoryLimit(microbatches=problem.held_by_1f1b)
    return replace(problem, memory_limit=limit, forward_only=False)


def _key(problem: Problem, effort_name: str) -> str:
    """Return a text of everything that a found schedule depends on, as the key of the cache."""
    return f"{effort_name}\n{problem!r}"


def _stored(name: str, problem: Problem, effort_name: str) -> Schedule | None:
    """Return the schedule that an earlier search stored for ``problem``, if it can still be
    proved."""
    text = disk_cache.load(name, _key(problem, effort_name))
    if text is None:
        return None
    try:
        check_table(text, "cached schedule")
        rows = cut_as_in(problem, from_csv(text, name)).rows
    except ValueError:
        return None
    program = _proved(Schedule(name, problem.placement, rows), problem)
    return None if program is None else _passes(name, program)


@dataclass(frozen=True)
class _Candidate:
    """Candidate for a search's result: a function that makes its rows, and the seconds of its step.

    The seconds assume that messages do not block ranks.
    """

    # Function that makes the rows. It is called on demand, as it is slow for a long step and few
    # candidates need their rows.
    rows: Callable[[], Rows]
    seconds: float


@dataclass(frozen=True)
class _Chosen:
    program: Program
    seconds: float  # simulated seconds of a step
    place: int  # position of the schedule among the candidates


def searched(name: str, problem: Problem, how: Effort) -> Schedule:
    """Return the schedule that a new search finds, as `best_schedule` does but without the cache.

    The memory limit must suffice for a microbatch.
    """
    return _passes(name, _searched(name, problem, how).program)


def searched_briefly(name: str, problem: Problem) -> Schedule:
    """Return the schedule that a search of about a second finds for ``problem``; it is not
    stored."""
    return searched(name, problem, effort().brief)


def _searched(name: str, problem: Problem, how: Effort) -> _Chosen:
    shop, least = job_shop_of(problem), lower_bound(problem, splits_backward=True) * (1 + 1e-9)
    if problem.options.recompute.fit:
        return _searched_with_recompute(name, problem, how, shop, least)
    known = _known(problem)
    starts = _starts_of_each(known, shop)
    candidates = _candidates(known, starts, shop)
    good = _best_of(name, _at_most(least, candidates, problem), problem)
    if good is not None and good.seconds <= least:
        return good
    if shop.fits:
        enough, of_shorter = int(least / shop.tick) + max(shop.tails), None
        if problem.microbatches > with_middle(problem) and not problem.costs.at_places:
            how = how.halved  # the other half of the effort is spent on a shorter step
            of_shorter = partial(_plans_of_shorter_step, problem, how)
        packed = search(shop, starts, enough, how, of_shorter)
        candidates += _packed_candidates(packed, shop, problem)
    best = _best_of(name, candidates, problem)
    assert best is not None  # a step that runs one microbatch after the other always fits
    return best


def _searched_with_recompute(
    name: str, problem: Problem, how: Effort, shop: JobShop, least: float
) -> _Chosen:
    """Search for the best schedule without recompute, then for the best one with recompute
    allowed."""
    without = _searched(name, problem.with_options(recompute=Recompute()), how)
    if without.seconds <= least:
        return without
    passes = without.program.schedule.compute_rows
    known = list(dict.fromkeys([passes, *_known_with_recompute(problem)]))
    found = search_with_recompute(problem, known, least, how) if shop.fits else []
    best = _best_of(name, _recompute_candidates([*known, *found], problem), problem)
    assert best is not None  # a step that runs one microbatch after the other always fits
    return best


def _at_most(
    seconds: float, candidates: Sequence[_Candidate], problem: Problem
) -> Sequence[_Candidate]:
    """Return the candidates of a search whose step may take no more than ``seconds``."""
    if _may_take_less(problem):
        return candidates
    return [candidate for candidate in candidates if candidate.seconds <= seconds * _ROUNDED]


_ROUNDED = 1.001  # largest factor by which rounding of costs to whole ticks may change a makespan


def _plans_of_shorter_step(problem: Problem, how: Effort) -> Iterator[Starts]:
    """Yield plans for a long step, made by repeating the middle of a shorter step's schedule.

    The shorter step has just enough microbatches for a middle that repeats. The search for the
    shorter step packs more plans for the same effort.
    """
    fewer = replace(problem, microbatches=with_middle(problem))
    best, *_ = search(job_shop_of(fewer), how=how)
    yield from plans_from(best.starts, problem.pieces, problem.slices.count)


def _passes(name: str, program: Program) -> Schedule:
    """Return the schedule of ``program`` with its compute passes only."""
    return replace(program.schedule, name=name, rows=program.schedule.compute_rows)


def _known_with_recompute(problem: Problem) -> list[Rows]:
    """Return schedules that need no search, with recomputation R if they exceed the memory
    limit."""
    alone = problem.with_options(recompute=Recompute())
    rows = dict.fromkeys([*_known(alone), *_known(replace(alone, memory_limit=None))])
    schedules = (Schedule("", problem.placement, of_ranks) for of_ranks in rows)
    return list(dict.fromkeys(recompute(schedule, problem).rows for schedule in schedules))


def _known(problem: Problem) -> list[Rows]:
    """Return schedules of the placement that need no search; some may exceed the memory limit."""
    rows = [_one_at_a_time(problem)]
    for resolved in on_placement(problem.placement):
        if problem.slices.count > 1 and not resolved.traits.takes_slices:
            continue
        if problem.costs.at_places and resolved.traits.uses_costs:
            # A family that uses costs takes longer than all others, and knows the costs of a mean
            # microbatch only.
            continue
        for variant in (problem, replace(problem, memory_limit=None)):
            try:
                schedule = resolved.build(variant)
            except ValueError:
                continue  # the family has no schedule for this problem
            if bitwise_order(schedule):
                rows.append(schedule.rows)
            break
    return rows


def _starts_of_each(all_rows: Sequence[Rows], shop: JobShop) -> list[Starts]:
    return [starts_of(rows, shop) for rows in all_rows]


def _candidates(
    all_rows: Sequence[Rows], all_starts: Sequence[Starts], shop: JobShop
) -> list[_Candidate]:
    """Return a candidate of the search for each of ``all_rows``, the shortest step first.

    ``all_starts`` are the start times of the passes in these rows.
    """
    both = zip(all_rows, all_starts, strict=True)
    candidates = [_Candidate(partial(_same, rows), _seconds(s, shop)) for rows, s in both]
    return sorted(candidates, key=lambda candidate: candidate.seconds)


def _same(rows: Rows) -> Rows:
    return rows


def _packed_candidates(
    packed: Sequence[Packed], shop: JobShop, problem: Problem
) -> list[_Candidate]:
    """Return a candidate of the search for each packed plan, the shortest step first."""
    candidates = [
        _Candidate(
            partial(rows_of, result.starts, problem.placement, orders=problem.orders),
            _seconds(timed(result.starts, shop), shop),
        )
        for result in packed
    ]
    return sorted(candidates, key=lambda candidate: candidate.seconds)


def _seconds(starts: Starts, shop: JobShop) -> float:
    """Return the seconds of a step whose passes start at the ticks ``starts``."""
    return (end_of(starts, shop) - max(shop.tails)) * shop.tick


def _recompute_candidates(all_rows: Sequence[Rows], problem: Problem) -> list[_Candidate]:
    """Return a candidate of the search for each of ``all_rows``, which may recompute
    activations."""
    placement, m = problem.placement, problem.microbatches
    candidates = []
    for rows in all_rows:
        shop = job_shop_of(problem, recomputed_in(rows, placement.stages, m))
        candidates.append(_Candidate(partial(_same, rows), _seconds(starts_of(rows, shop), shop)))
    return candidates


def _best_of(name: str, candidates: Sequence[_Candidate], problem: Problem) -> _Chosen | None:
    """Return the candidate whose proved program has the shortest step; None if none can be proved.

    Of equal ones the first is taken. Messages cost time, so a candidate that is no faster without
    them need not be simulated. (Exceptions: if steps overlap, a rank that idles in the middle of
    its span may begin its step later; and a W right behind its I may take less time than plans
    count.)
    """
    best: _Chosen | None = None
    may_take_less = _may_take_less(problem)
    for place, candidate in sorted(enumerate(candidates), key=lambda entry: entry[1].seconds):
        is_known_worse = best and (candidate.seconds, place) > (best.seconds, best.place)
        if is_known_worse and not may_take_less:
            continue
        schedule = Schedule(name, problem.placement, candidate.rows())
        program = _proved(schedule, problem) if _is_within_limit(schedule, problem) else None
        if program is not None:
            seconds = step_seconds(program, problem.costs)
            if best is None or (seconds, place) < (best.seconds, best.place):
                best = _Chosen(program, seconds, place)
    return best


def _may_take_less(problem: Problem) -> bool:
    """Return whether a step may take less time than the search's plans count.

    That is so if steps overlap, or if a W directly follows its I.
    """
    return problem.options.steps_overlap or any(problem.costs.passes.fused_backward_saving)


def _is_within_limit(schedule: Schedule, problem: Problem) -> bool:
    assert problem.memory_limit is not None
    amount, allowed = limited_amount(problem.memory_limit, schedule, problem.costs)
    return all(fits(peak, allowed) for peak in peaks(schedule, amount))


def _proved(schedule: Schedule, problem: Problem) -> Program | None:
    """Return the proved program of ``schedule``; None if it is invalid or exceeds the memory
    limit."""
    try:
        program = complete(schedule, problem)
    except ValueError:
        return None
    return program if bitwise_order(schedule) else None


def _one_at_a_time(problem: Problem) -> Rows:
    """Return rows that run one microbatch at a time, the schedule of least memory."""

    def passes(stages: Sequence[int], k: int) -> Iterator[Action]:
        parts = problem.parts(k)
        yield from (Action(stage, Kind.FORWARD, part) for stage in stages for part in parts)
        for stage in reversed(stages):
            for part in reversed(parts):
                yield Action(stage, Kind.BACKWARD_INPUT, part)
                yield Action(stage, Kind.BACKWARD_WEIGHT, part)

    return tuple(
        tuple(action for k in range(problem.microbatches) for action in passes(stages, k))
        for stages in problem.placement.stages_of
    )


def _check_limit(name: str, problem: Problem) -> None:
    """Raise ValueError if the memory limit is too small for one microbatch at a time.

    It is also raised if the limit is in bytes and the costs have none.
    """
    limit, placement = problem.memory_limit, problem.placement
    assert limit is not None
    if limit.bytes is None:
        assert limit.microbatches is not None
        least, allowed = 1.0, limit.microbatches
    elif problem.slices.count > 1:
        bytes_for(limit, problem.costs)
        alone = Schedule(name, placement, _one_at_a_time(problem))
        least, allowed = max(peaks(alone, in_bytes(problem.costs))), float(limit.bytes)
    else:
        held, allowed = bytes_for(limit, problem.costs), float(limit.bytes)
        activation, rest = held[Held.ACTIVATION], held[Held.WEIGHT_INPUTS]
        least = max(
            math.fsum(activation[stage] for stage in stages[: chunk + with_last])
            + (0.0 if with_last else rest[last])
            for stages in placement.stages_of
            for chunk, last in enumerate(stages)
            for with_last in (0, 1)
        )
    if not fits(least, allowed):
        raise ValueError(
            f"{name}: the memory limit of {limit} does not hold even one microbatch; "
            f"the least feasible limit is {limit.at_least(least)}"
        )
