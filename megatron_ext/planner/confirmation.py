"""The verdict of a plan, confirmed by schedules that are built whole.

The times of long steps are told by their repeating part. That is exact if the family makes the same
schedule for more microbatches, and up to 0.3 % off for some families that place W by the costs. So
schedules that could be recommended are built whole, and ranked by their true times.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from megatron_ext.compile.program.repeating_part import SAME
from megatron_ext.planner.candidate import Candidate, Plan, by_time
from megatron_ext.planner.fitting import built_whole
from megatron_ext.planner.planning_time import until_end
from megatron_ext.planner.verdict import Alternative, Verdict, eligible, verdict
from megatron_ext.progress import remark

CLOSE = 0.02  # of a step: what takes so much more than the shortest may prove to be shorter


def confirmed_verdict(
    plan: Plan,
    baseline: Alternative | None,
    others: Sequence[Alternative],
    free: float | None = None,
    refusal: Callable[[Alternative], str | None] = lambda one: None,
    *,
    confirms_all: bool = True,
) -> tuple[Verdict, Plan]:
    """Return the `verdict` on ``baseline`` and ``others``, and ``plan`` with true figures.

    What is recommended is always built whole. With ``confirms_all``, and as long as there is
    planning time, so is every alternative that takes up to `CLOSE` more time than the shortest. A
    schedule that cannot be built whole is ignored, and a remark says so.

    Args:
        free: bytes that a rank may take; None: not known.
        refusal: reason why a job could not start under an alternative, or as it is, if it could
            not. Only what is recommended is checked.
    """
    pool = list(others)
    can_start: list[Alternative] = []
    has_time = confirms_all
    while True:
        found = verdict(baseline, pool, free)
        recommended = [one for one in (found.taken, found.stock) if one is not None]
        told = next(_told([*recommended, *(_close(pool) if has_time else [])], pool), None)
        if told is not None:
            whole: Alternative | None = told
            if told in recommended:
                whole = _built(told, free)
            else:
                whole = until_end(partial(_built, told, free), whole)
            if whole is told:
                has_time = False
                continue
            at = pool.index(told)
            pool[at : at + 1] = [] if whole is None else [whole]
            plan = _with_whole(plan, told.candidate, None if whole is None else whole.candidate)
            continue
        doubtful = next((one for one in recommended if one not in can_start), None)
        if doubtful is None:
            return found, plan
        why = refusal(doubtful)
        if why is None:
            can_start.append(doubtful)
            continue
        remark(f"{shlex.join(doubtful.write().added)} is ignored: {why}")
        if doubtful is baseline:
            baseline = None
        else:
            pool.remove(doubtful)


def _told(
    alternatives: Sequence[Alternative], pool: Sequence[Alternative]
) -> Iterator[Alternative]:
    return (one for one in alternatives if not one.candidate.is_whole and one in pool)


def _close(pool: Sequence[Alternative]) -> list[Alternative]:
    """Return the alternatives that may prove to be the shortest, shortest first."""
    ordered = sorted(eligible(pool), key=lambda one: one.seconds)
    return [one for one in ordered if one.seconds <= (1 + CLOSE) * ordered[0].seconds]


def _built(told: Alternative, free: float | None) -> Alternative | None:
    """Return ``told`` with its true figures; None if it cannot be built whole."""
    before = told.candidate
    try:
        whole = built_whole(before, free)
    except ValueError as error:
        remark(f"{before.schedule} is ignored: its whole step cannot be built: {error}")
        return None
    if abs(whole.step - before.step) > SAME * before.step:
        remark(
            f"{before.schedule} takes {whole.step:.6g} a step, built whole, and not "
            f"{before.step:.6g}, as its repeating part told"
        )
    return replace(told, candidate=whole, seconds=told.seconds + whole.step - before.step)


def _with_whole(plan: Plan, told: Candidate, whole: Candidate | None) -> Plan:
    """Return ``plan`` with ``whole`` in place of ``told``."""
    candidates = [whole if one is told else one for one in plan.candidates]
    return replace(plan, candidates=tuple(sorted(filter(None, candidates), key=by_time)))
