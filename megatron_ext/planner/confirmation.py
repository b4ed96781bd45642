"""The verdict of a plan, confirmed by schedules that are built whole.

The times of long steps are extrapolated from their repeating part. That is exact if the family
makes the same schedule for more microbatches, and up to 0.3 % off for some families that place W by
the costs. So schedules that could be recommended are built whole, and ranked by their true times.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from megatron_ext.base.progress import remark
from megatron_ext.compile.program.repeating_part import SAME
from megatron_ext.planner.candidate import Candidate, Plan, by_time
from megatron_ext.planner.fitting import built_in_full, check_bytes
from megatron_ext.planner.planning_time import WHOLE_STEPS, until_end
from megatron_ext.planner.verdict import Alternative, Verdict, Written, eligible, verdict_of
from megatron_ext.schedule.problem import Offload

# An alternative is built as a whole program, too, if its estimate is slower than the shortest step
# by at most this share, since the program may prove to be shorter.
CLOSE = 0.02
_LIMIT = "--pipeline-memory-limit"


def confirmed_verdict(
    plan: Plan,
    baseline: Alternative | None,
    others: Sequence[Alternative],
    judge: Callable[[Alternative], Alternative],
    free: float | None = None,
    *,
    confirms_all: bool = True,
) -> tuple[Verdict, Plan]:
    """Return the recommendation for a job, and its plan, after a check with exact times.

    The times of long steps are estimates at first. What is recommended is always judged exactly.
    With ``confirms_all``, and as long as there is planning time, every alternative that takes up to
    `CLOSE` more time than the shortest is built with all microbatches. An alternative that is
    refused, or cannot be built, is ignored, and a remark says so.

    Args:
        plan: the schedules compared.
        baseline: the unchanged job; None if it cannot start.
        others: all other alternatives.
        judge: function that returns an alternative with time and memory of the job that is changed
            to it, or raises ValueError if that job could not start.
        free: bytes that a rank may take; None: not known.
    """
    confirmation = _Confirmation(plan, baseline, list(others), free, judge, confirms_all)
    while True:
        found = verdict_of(confirmation.baseline, confirmation.pool, free)
        recommended = [one for one in (found.taken, found.stock) if one is not None]
        if confirmation.judge_next(recommended) or confirmation.build_next():
            continue  # the plan's recommendation may have changed, so it is looked for once more
        return found, confirmation.plan


@dataclass
class _Confirmation:
    """State of the check of a plan's recommendation with exact times (`confirmed_verdict`).

    The check repeats its steps until the recommendation no longer changes.

    Attributes:
        plan: the plan, with the exact times and memory that are known so far.
        baseline: the unchanged job; None: it cannot start, or nothing is known of it.
        pool: all alternatives that may be recommended.
        free, judge: as in `confirmed_verdict`.
        builds_close: whether alternatives that are only close to the shortest are built, too.
        judged: the results of ``judge``.
    """

    plan: Plan
    baseline: Alternative | None
    pool: list[Alternative]
    free: float | None
    judge: Callable[[Alternative], Alternative]
    builds_close: bool
    judged: list[Alternative] = field(default_factory=list)

    def judge_next(self, recommended: Sequence[Alternative]) -> bool:
        """Judge the next recommended alternative that was not judged; return whether there was
        one."""
        for one in recommended:
            if one in self.judged:
                continue
            try:
                true = self.judge(one)
                check_bytes(true.candidate, self.free)
            except ValueError as error:
                remark(f"{shlex.join(one.write().added) or one.name} is ignored: {error}")
                if one is self.baseline:
                    self.baseline = None
                else:
                    self._replace(one, None)
            else:
                if one is self.baseline:
                    true = one
                else:
                    _tell_difference(one, true)
                    self._replace(one, true)
                self.judged.append(true)
            return True
        return False

    def build_next(self) -> bool:
        """Build the next alternative close to the shortest step with all microbatches.

        Return whether there was one.
        """
        close = _close(self.pool) if self.builds_close else []
        estimated = next((one for one in close if not one.candidate.has_all_microbatches), None)
        if estimated is None:
            return False
        built, self.builds_close = _built_in_time(estimated, self.free)
        if self.builds_close:
            self._replace(estimated, built)
        return True

    def _replace(self, estimated: Alternative, built: Alternative | None) -> None:
        """Replace the alternative ``estimated`` by ``built``, which has exact time and memory; None
        removes it."""
        at = self.pool.index(estimated)
        self.pool[at : at + 1] = [] if built is None else [built]
        true = None if built is None else built.candidate
        self.plan = _with_built(self.plan, estimated.candidate, true)


def _close(pool: Sequence[Alternative]) -> list[Alternative]:
    """Return the alternatives that may prove to be the fastest, shortest estimated step first."""
    ordered = sorted(eligible(pool), key=lambda one: one.seconds)
    return [one for one in ordered if one.seconds <= (1 + CLOSE) * ordered[0].seconds]


def _built_in_time(estimated: Alternative, free: float | None) -> tuple[Alternative | None, bool]:
    """Return the result of `_built` for an alternative, and whether planning time was left for
    it."""
    without: tuple[Alternative | None, bool] = (None, False)
    return until_end(lambda: (_built(estimated, free), True), without, WHOLE_STEPS)


def _built(estimated: Alternative, free: float | None) -> Alternative | None:
    """Return an alternative with exact time and memory of all microbatches; None if it cannot be
    built."""
    try:
        built = with_whole_step(estimated, free)
    except ValueError as error:
        remark(f"{estimated.candidate.schedule} is ignored: {error}")
        return None
    _tell_difference(estimated, built)
    return built


def with_whole_step(estimated: Alternative, free: float | None = None) -> Alternative:
    """Return an alternative with exact time and memory of a step built with all microbatches.

    Raises ValueError if the step cannot be built.
    """
    before = estimated.candidate
    try:
        built = built_in_full(before, free)
    except ValueError as error:
        raise ValueError(f"the schedule of a whole step cannot be built: {error}") from error
    seconds = estimated.seconds + built.step - before.step
    return replace(estimated, candidate=built, seconds=seconds)


def without_idle_limit(one: Alternative) -> Alternative:
    """Return an alternative without the memory limit in its flags, if the limit changes nothing.

    The limit has to be the plan's, and not the user's. The schedule must be the same without it.
    """
    made, written = one.candidate, one.write()
    if made.limit is None or _LIMIT not in written.added:
        return one
    options = made.variant.problem.options
    # Recompute fit and offload fit need a memory limit.
    if options.recompute.fit or options.activation_offload is Offload.FIT:
        return one
    # Without a limit from the user searches stay within the memory of 1F1B.
    if made.variant.resolved.traits.searches and made.report.peak > made.report.pp:
        return one
    problem = replace(made.variant.problem, memory_limit=None)
    unlimited = replace(made, limit=None, variant=replace(made.variant, problem=problem))
    try:
        if unlimited.program().schedule != made.program().schedule:
            return one
    except ValueError:  # the alternative cannot be built without a limit
        return one
    without = _without_limit(written)
    return replace(one, candidate=unlimited, write=lambda: without)


def _without_limit(written: Written) -> Written:
    at = written.added.index(_LIMIT)
    return replace(written, added=(*written.added[:at], *written.added[at + 2 :]))


def _tell_difference(estimated: Alternative, true: Alternative) -> None:
    before, after = estimated.candidate, true.candidate
    if abs(after.step - before.step) > SAME * before.step:
        remark(
            f"{before.schedule} takes {after.step:.6g} a step when built whole; the estimate from "
            f"its repeating part was {before.step:.6g}"
        )


def _with_built(plan: Plan, estimated: Candidate, built: Candidate | None) -> Plan:
    """Return ``plan`` with the candidate ``estimated`` replaced by ``built``, or removed if
    None."""
    candidates = [built if one is estimated else one for one in plan.candidates]
    return replace(plan, candidates=tuple(sorted(filter(None, candidates), key=by_time)))
