"""Choice of an ``auto``: of the searches that it leaves open, the one with the shortest step.

``auto`` may stand for several searches, on different placements. All are simulated for the problem,
and the line that is logged says why one was taken and how far the others are behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ext.base.words import counted
from megatron_ext.compile.registry import ResolvedSpec, choose, entry_of
from megatron_ext.planner.candidate import Candidate, Plan, Variant, VocabMethod
from megatron_ext.planner.figures import slower_by
from megatron_ext.planner.planner import make_plan
from megatron_ext.schedule.problem import Problem

AS_1F1B = "1x"  # default memory limit of searches: 1F1B's, in microbatches


@dataclass(frozen=True)
class Taken:
    """Schedule that ``auto`` has chosen, and one line that compares it with the others."""

    spec: str
    why: str


def take(searches: Sequence[str], problem_of: Callable[[ResolvedSpec], Problem]) -> Taken:
    """Return the searching schedule of ``searches`` whose step is the shortest.

    Args:
        problem_of: function that returns the problem of a schedule, on its own placement. It raises
            ValueError if there is none.

    Raises:
        ValueError: no schedule can be made.
    """

    def variant(spec: str, method: VocabMethod) -> Variant | None:
        resolved = choose(spec)
        problem = problem_of(resolved)
        is_asked_for = method.vocabulary is problem.options.vocab_parallel
        if not is_asked_for or method is VocabMethod.REDISTRIBUTED:
            return None
        return Variant(resolved, problem, in_seconds=False)

    plan = make_plan(variant, only_promising=True, specs=searches)
    if plan.best is None:
        raise ValueError(f"no schedule can be made: {nothing_left(plan)}")
    limit = plan.best.limit
    within = "" if limit is None else f"within {limit}"
    return Taken(plan.best.schedule, in_words(plan, plan.best, within))


def in_words(plan: Plan, taken: Candidate, within: str = "") -> str:
    """Return a sentence that says why the schedule ``taken`` is chosen among those of ``plan``.

    It reads ``the shortest predicted step of 3 schedules; then v-auto (0.4% longer) ...``.
    ``within`` is a limit that all of them meet, in words.
    """
    others = [
        f"{other.schedule} ({longer(slower_by(other, taken))})"
        for other in plan.best_of_each
        if other.schedule != taken.schedule
    ]
    compared = counted(len(plan.best_of_each), "schedule")
    text = f"the shortest predicted step of {compared} {within}".rstrip()
    text += f"; then {', '.join(others)}" if others else ""
    return f"{text}; not compared: {schedules_not_compared(plan)}" if plan.refusals else text


def schedules_not_compared(plan: Plan) -> str:
    """Return a text of the schedules that a plan has not compared, with the reasons.

    Schedules with the same reason stand together.
    """
    return "; ".join(
        # The part of a refusal behind the semicolon says what to write, and is dropped here.
        f"{', '.join(specs)} ({why.partition(';')[0]})"
        for why, specs in _refused_alike(plan).items()
    )


def nothing_left(plan: Plan) -> str:
    """Return a text of why a plan has no candidates, with a remedy for the first reason."""
    first, *_ = _refused_alike(plan)
    _, found, fix = first.partition("; ")
    return f"{schedules_not_compared(plan)}; {fix}" if found else schedules_not_compared(plan)


def _refused_alike(plan: Plan) -> dict[str, list[str]]:
    """Return the schedules that a plan refuses, by the reason of their refusal."""
    specs: dict[str, list[str]] = {}
    for (spec, _), why in plan.refusals.items():
        specs.setdefault(why.removeprefix(f"{entry_of(spec).name}: "), []).append(spec)
    return specs


def longer(share: float) -> str:
    """Return text such as ``0.4% longer`` for the ``share`` by which a step is longer than
    another."""
    return f"{share:.1%} longer" if share >= 0.0005 else "about as long"
