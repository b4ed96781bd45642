"""The verdict of a plan, confirmed by schedules that are built whole.

The times of long steps are extrapolated from their repeating part. That is exact if the family
makes the same schedule for more microbatches, and up to 0.3 % off for some families that place W by
the costs. So schedules that could be recommended are built whole, and ranked by their true times.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

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
    confirmation = _Confirmation(plan, baseline, list(others), free, refusal, confirms_all)
    while True:
        found = verdict(confirmation.baseline, confirmation.pool, free)
        recommended = [one for one in (found.taken, found.stock) if one is not None]
        if confirmation.build_next(recommended) or confirmation.remove_unstartable(recommended):
            continue  # the verdict may be another one now
        return found, confirmation.plan


@dataclass
class _Confirmation:
    """Progress of `confirmed_verdict`, which takes one step after another until the verdict stays.

    Attributes:
        plan: the plan, with the true figures that are known so far.
        baseline: the unchanged job; None if it could not start.
        pool: all alternatives that may be recommended.
        free, refusal: as in `confirmed_verdict`.
        builds_close: whether alternatives that are only close to the shortest are built, too.
        can_start: alternatives for which ``refusal`` has given no reason.
    """

    plan: Plan
    baseline: Alternative | None
    pool: list[Alternative]
    free: float | None
    refusal: Callable[[Alternative], str | None]
    builds_close: bool
    can_start: list[Alternative] = field(default_factory=list)

    def build_next(self, recommended: Sequence[Alternative]) -> bool:
        """Build whole the next alternative that has to be: one of ``recommended`` first. Return
        whether there was one."""
        close = _close(self.pool) if self.builds_close else []
        estimated = next(_estimated([*recommended, *close], self.pool), None)
        if estimated is None:
            return False
        if estimated in recommended:
            self._replace(estimated, _built(estimated, self.free))
            return True
        whole, self.builds_close = _built_in_time(estimated, self.free)
        if self.builds_close:
            self._replace(estimated, whole)
        return True

    def _replace(self, estimated: Alternative, whole: Alternative | None) -> None:
        """Put ``whole`` in place of ``estimated``; None removes it."""
        at = self.pool.index(estimated)
        self.pool[at : at + 1] = [] if whole is None else [whole]
        true = None if whole is None else whole.candidate
        self.plan = _with_whole(self.plan, estimated.candidate, true)

    def remove_unstartable(self, recommended: Sequence[Alternative]) -> bool:
        """Remove the first of ``recommended`` that could not start, and say why. Return whether
        there was one."""
        for one in recommended:
            if one in self.can_start:
                continue
            if (why := self.refusal(one)) is None:
                self.can_start.append(one)
                continue
            remark(f"{shlex.join(one.write().added)} is ignored: {why}")
            if one is self.baseline:
                self.baseline = None
            else:
                self.pool.remove(one)
            return True
        return False


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
