"""The verdict of a plan, confirmed by schedules that are built whole.

The times of long steps are extrapolated from their repeating part. That is exact if the family
makes the same schedule for more microbatches, and up to 0.3 % off for some families that place W by
the costs. So schedules that could be recommended are built whole, and ranked by their true times.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_ext.compile.program.repeating_part import SAME
from megatron_ext.planner.candidate import Candidate, Plan, by_time
from megatron_ext.planner.fitting import built_whole
from megatron_ext.planner.planning_time import until_end
from megatron_ext.planner.verdict import Alternative, Verdict, eligible, verdict
from megatron_ext.progress import remark

# Share of the shortest step. An alternative that takes up to so much more may prove to be shorter.
CLOSE = 0.02


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
        refusal: returns the reason why a job could not start under an alternative or under
            ``baseline``; None if it could. Only what is recommended is checked.
    """
    pool = list(others)
    can_start: list[Alternative] = []
    has_time = confirms_all
    while True:
        found = verdict(baseline, pool, free)
        recommended = [one for one in (found.taken, found.stock) if one is not None]
        close = _close(pool) if has_time else []
        estimated = next(_estimated([*recommended, *close], pool), None)
        if estimated is not None:
            if estimated in recommended:
                whole = _built(estimated, free)
            else:
                whole, has_time = _built_in_time(estimated, free)
                if not has_time:
                    continue
            at = pool.index(estimated)
            pool[at : at + 1] = [] if whole is None else [whole]
            true = None if whole is None else whole.candidate
            plan = _with_whole(plan, estimated.candidate, true)
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


def _estimated(
    alternatives: Sequence[Alternative], pool: Sequence[Alternative]
) -> Iterator[Alternative]:
    """Yield those of ``alternatives`` in ``pool`` that are not built whole. (The baseline is not in
    the pool.)"""
    return (one for one in alternatives if not one.candidate.is_whole and one in pool)


def _close(pool: Sequence[Alternative]) -> list[Alternative]:
    """Return the alternatives that may prove to be the shortest, shortest first."""
    ordered = sorted(eligible(pool), key=lambda one: one.seconds)
    return [one for one in ordered if one.seconds <= (1 + CLOSE) * ordered[0].seconds]


def _built_in_time(estimated: Alternative, free: float | None) -> tuple[Alternative | None, bool]:
    """Return the result of `_built`, and whether planning time was left for it."""
    without: tuple[Alternative | None, bool] = (None, False)
    return until_end(lambda: (_built(estimated, free), True), without)


def _built(estimated: Alternative, free: float | None) -> Alternative | None:
    """Return ``estimated`` with its true figures; None if it cannot be built whole."""
    before = estimated.candidate
    try:
        whole = built_whole(before, free)
    except ValueError as error:
        remark(f"{before.schedule} is ignored: its whole step cannot be built: {error}")
        return None
    if abs(whole.step - before.step) > SAME * before.step:
        remark(
            f"{before.schedule} takes {whole.step:.6g} a step when built whole; the estimate from "
            f"its repeating part was {before.step:.6g}"
        )
    seconds = estimated.seconds + whole.step - before.step
    return replace(estimated, candidate=whole, seconds=seconds)


def _with_whole(plan: Plan, estimated: Candidate, whole: Candidate | None) -> Plan:
    """Return ``plan`` with ``whole`` in place of ``estimated``."""
    candidates = [whole if one is estimated else one for one in plan.candidates]
    return replace(plan, candidates=tuple(sorted(filter(None, candidates), key=by_time)))
