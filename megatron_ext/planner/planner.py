"""Comparison of all families on one model.

Trying everything is the only fair comparison, and searches with each treatment of the vocabulary
would take minutes. So families that need no search come first, and of the families that search,
only the few that are best without a search are searched. A schedule that is not compared is refused
with the reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_ext.base.progress import Task, task
from megatron_ext.compile.auto_spec import SEARCHES
from megatron_ext.compile.registry import Maturity, entries, entry_of
from megatron_ext.planner.candidate import (
    Candidate,
    Plan,
    Variant,
    VocabMethod,
    by_time,
    stable_of,
    tied,
)
from megatron_ext.planner.figures import step_phrase
from megatron_ext.planner.fitting import TooFull, consider
from megatron_ext.planner.limits import is_close, least_time
from megatron_ext.planner.planning_time import SCHEDULES, until_end
from megatron_ext.schedule.limit import MemoryLimit

# Function from a spec and a vocabulary method to the problem to solve; None if the two are not
# compared. It raises ValueError if no problem exists.
VariantOf = Callable[[str, VocabMethod], Variant | None]
SpecWithMethod = tuple[str, VocabMethod]  # spec of a schedule, and method for its vocabulary

_MATURITIES = tuple(Maturity)  # maturities in the order of comparison: stable schedules come first
# Begin of a refusal whose bound holds for every order of the passes.
_EVERY_ORDER = "every order of the passes takes"
SEARCHED = 2  # number of searches that are run for each vocabulary method
NO_TIME = "not compared: the time of the plan was over"


def make_plan(
    variant_of: VariantOf,
    allowed_bytes: float | None = None,
    only_promising: bool = False,
    may_offload: bool = False,
    better_than: Candidate | None = None,
    specs: Sequence[str] | None = None,
    known: Sequence[Candidate] = (),
    is_long: bool = False,
) -> Plan:
    """Build and simulate every schedule with every treatment of the vocabulary; return the plan.

    Of the families that search, only the `SEARCHED` best without a search are searched, with each
    treatment. Laboratory schedules are not made to fit, since others fit in less time. If the
    planning time ends first (`planning_time`), the plan has what was compared by then.

    Args:
        variant_of: function that returns the problem of a schedule and a treatment.
        allowed_bytes: bytes that a rank has for everything; None: as much as it takes.
        only_promising: refuse what is proved to take longer than a stable schedule, and search with
            one treatment of the vocabulary only, that of the best before.
        may_offload: let activations of a schedule be copied to the host if it does not fit without.
        better_than: a candidate that is known, with which ``only_promising`` compares.
        specs: the schedules that are compared; None: every family, and those that search with each
            number of chunks (`SEARCHES`).
        known: candidates that were made of ``variant_of`` in ``allowed_bytes`` before.
        is_long: whether steps are so long that searches take minutes. A schedule is then made to
            fit only after all others, and if it would not take longer than the best of them; one
            that is `CLOSE` to its lower bound is not searched.
    """
    comparison = _Comparison(
        variant_of, allowed_bytes, only_promising, may_offload, better_than, known, is_long
    )
    pairs = [(spec, method) for spec in specs or all_specs() for method in VocabMethod]
    searched = [one for one in pairs if entry_of(one[0]).traits.searches]
    at_once = [one for one in pairs if one not in searched]
    at_once.sort(key=lambda one: _MATURITIES.index(entry_of(one[0]).maturity))

    def compare() -> bool:
        with task("comparing schedules", len(pairs)) as work:
            for one in at_once:
                comparison.add(one, may_be_made_to_fit=not is_long)
                work.done += 1
                work.found = comparison.found
            if is_long:
                comparison.make_fit(work)
            for method in VocabMethod:
                comparison.add_searched([one for one in searched if one[1] is method], work)
        return True

    if not until_end(compare, False, SCHEDULES):
        comparison.leave_out(pairs)
    return Plan(tuple(sorted(comparison.candidates, key=by_time)), comparison.refusals)


def all_specs() -> Iterator[str]:
    """Yield the name of every schedule family; of one that searches, with each number of chunks."""
    with_chunks = defaultdict(list)
    for search in SEARCHES:
        with_chunks[entry_of(search.spec).name].append(search.spec)
    for name in entries():
        yield from with_chunks.get(name, [name])


class _Comparison:
    """Comparison of schedules for a plan that is being made. Arguments are those of `make_plan`."""

    def __init__(
        self,
        variant_of: VariantOf,
        allowed_bytes: float | None,
        only_promising: bool,
        may_offload: bool,
        better_than: Candidate | None,
        known: Sequence[Candidate],
        is_long: bool,
    ) -> None:
        self.candidates: list[Candidate] = []
        self.refusals: dict[SpecWithMethod, str] = {}
        self._variant_of, self._better_than = variant_of, better_than
        self._known = {(made.schedule, made.method): made for made in known}
        self._is_long = is_long
        self._too_full: dict[
            SpecWithMethod, float
        ] = {}  # seconds of a step if memory were unlimited
        self._allowed_bytes, self._may_offload = allowed_bytes, may_offload
        self._only_promising = only_promising

    def add(self, spec_and_method: SpecWithMethod, *, may_be_made_to_fit: bool = True) -> bool:
        """Add the schedule as a candidate of the plan, or store the reason of its refusal.

        Return whether it is a candidate.
        """
        candidate = self._consider(spec_and_method, may_be_made_to_fit=may_be_made_to_fit)
        if candidate is None:
            return False
        # The candidate's refusal is removed before it is added, as the planning time may end
        # between the two statements.
        self.refusals.pop(spec_and_method, None)
        self.candidates.append(candidate)
        return True

    def make_fit(self, work: Task) -> None:
        """Try offload or recompute for schedules with too much memory, the shortest step first.

        Schedules are tried as long as they may be faster than the best.
        """
        for spec_and_method, seconds in sorted(self._too_full.items(), key=lambda full: full[1]):
            best = self._best
            if best is None or seconds < best.step:
                self.add(spec_and_method)
                work.found = self.found

    @property
    def found(self) -> str:
        """The best candidate of the comparison so far, in words."""
        best = next(iter(tied(stable_of(self.candidates))), None)
        return "" if best is None else f"so far the best is {best.schedule}: {step_phrase(best)}"

    def add_searched(self, pairs: Sequence[SpecWithMethod], work: Task) -> None:
        """Search the best `SEARCHED` of some schedules, ordered by their results without a
        search."""
        short = [self._consider(one, without_search=True) for one in pairs]
        ahead: list[str] = []
        for candidate in sorted(filter(None, short), key=by_time):
            spec_and_method = candidate.schedule, candidate.method
            if len(ahead) == SEARCHED:
                self.refusals[spec_and_method] = (
                    f"{' and '.join(ahead)} take less time before any search"
                )
            elif self._is_long and self._is_known_enough(candidate):
                self.candidates.append(candidate)
                ahead.append(candidate.schedule)
            elif self.add(spec_and_method):
                ahead.append(candidate.schedule)
                work.found = self.found
        work.done += len(pairs)

    def _is_known_enough(self, candidate: Candidate) -> bool:
        """Return whether a schedule needs no search, given its result without one.

        That is so if its step is close to the lower bound, or no shorter than the best so far.
        """
        best = self._best
        return is_close(candidate) or (best is not None and candidate.step >= best.step)

    def _consider(
        self,
        spec_and_method: SpecWithMethod,
        without_search: bool = False,
        *,
        may_be_made_to_fit: bool = True,
    ) -> Candidate | None:
        spec, method = spec_and_method
        try:
            variant = self._variant_of(spec, method)
            if variant is None:
                return None
            variant.check_launch()
            if (variant.resolved.spec, method) in self._known:
                return self._known[variant.resolved.spec, method]
            best = self._best
            if best is not None:
                _check_promising(variant, method, self._allowed_bytes, best)
            if best is not None and self._is_long and variant.resolved.traits.searches:
                _check_on_stages_of(best, variant)
            if without_search:
                variant = replace(variant, resolved=variant.resolved.without_search)
            elif variant.resolved.traits.searches:
                variant = self._within_the_best(variant)
            at_most = best.step if best is not None and self._is_long else math.inf
            if entry_of(spec).maturity is Maturity.LABORATORY or not may_be_made_to_fit:
                at_most = 0.0
            return consider(variant, method, self._allowed_bytes, self._may_offload, at_most)
        except TooFull as error:
            self._too_full[spec_and_method] = error.seconds
            self.refusals[spec_and_method] = str(error)
            return None
        except ValueError as error:
            self.refusals[spec_and_method] = str(error)
            return None

    def _within_the_best(self, variant: Variant) -> Variant:
        """Return a searching schedule limited to the peak memory of the best candidate so far.

        Only a schedule whose model is not known, and that has no limit of its own, is limited so. A
        search without any limit would stay within 1F1B's memory.
        """
        problem = variant.problem
        best = min(stable_of(self.candidates), key=by_time, default=None)
        if problem.memory_limit is not None or variant.model is not None or best is None:
            return variant
        if best.report.peak <= problem.ranks:
            return variant
        limit = MemoryLimit(microbatches=best.report.peak)
        return replace(variant, problem=replace(problem, memory_limit=limit))

    @property
    def _best(self) -> Candidate | None:
        """The best stable candidate so far, if `make_plan` should refuse worse ones; else None."""
        there = [*self.candidates, *self._known.values()]
        better = [] if self._better_than is None else [self._better_than]
        known = (*stable_of(there), *better) if self._only_promising else ()
        return min(known, key=by_time, default=None)

    def leave_out(self, pairs: Sequence[SpecWithMethod]) -> None:
        """Refuse each schedule that was not compared for lack of planning time.

        Candidates that were known already are added.
        """
        there = {(made.schedule, made.method) for made in self.candidates}
        self.candidates += [made for one, made in self._known.items() if one not in there]
        answered = {made.schedule for made in self.candidates} | {spec for spec, _ in self.refusals}
        for spec in dict.fromkeys(spec for spec, _ in pairs if spec not in answered):
            self.refusals[spec, VocabMethod.NAIVE] = NO_TIME


def _check_promising(
    variant: Variant, method: VocabMethod, allowed_bytes: float | None, best: Candidate
) -> None:
    """Raise ValueError if no schedule like ``variant`` can be faster than ``best``.

    It is also raised for a search with another vocabulary method than the best.
    """
    problem = variant.problem
    if variant.resolved.traits.searches and method is not best.method:
        raise ValueError(
            f"searches run only with the vocabulary partitioned as in {best.schedule}, the best "
            "schedule so far"
        )
    if problem.options.pairs:  # no lower bound of steps with overlapped passes is known
        return
    # Recompute may meet any memory limit and makes a step longer, so the lower bound ignores both.
    if variant.may_recompute:
        problem = replace(problem, memory_limit=None)
    elif allowed_bytes is not None and variant.model is not None and problem.memory_limit is None:
        left = max(allowed_bytes - min(rank.total for rank in variant.model), 0.0)
        problem = replace(problem, memory_limit=MemoryLimit(bytes=int(left)))
    bound = least_time(problem, variant.resolved.traits.splits_backward)
    if bound > best.step:
        raise ValueError(
            f"{_EVERY_ORDER} at least {bound / best.step - 1:.1%} more time than {best.schedule}"
        )


def _check_on_stages_of(best: Candidate, variant: Variant) -> None:
    """Raise ValueError if the placement of ``variant`` is not that of the ``best`` schedule."""
    if variant.problem.placement != best.variant.problem.placement:
        raise ValueError(
            f"searches run only on the placement of {best.schedule}, the best schedule so far"
        )


def without_figures(why: str) -> str:
    """Return the reason of a schedule's refusal without its numbers, so that equal reasons are
    equal."""
    return (
        f"{_EVERY_ORDER} more time than another schedule" if why.startswith(_EVERY_ORDER) else why
    )
