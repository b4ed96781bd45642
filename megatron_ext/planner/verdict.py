"""One verdict for a training job: keep what it has, or the change that is worth writing.

All ways to train the job compete in one pool: other schedules, layouts, and flags of Megatron's
own, with what the job has now. The shortest step that fits wins. Steps within `ALIKE` of it are a
tie, of which the one that holds least memory is taken, and of equally lean ones the one with fewer
settings; a change has to save `WORTH` of a step.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_ext.planner.candidate import (
    ALIKE,
    Candidate,
    VocabMethod,
    setting_names,
    stable_of,
    tied_for_best,
)
from megatron_ext.planner.spread import ComparisonKind, GainSpread
from megatron_ext.schedule.problem import Recompute
from megatron_ext.schedule.stock_executor import STOCK

WORTH = 0.02  # least gain that an estimate can show, as a share of a step


@dataclass(frozen=True)
class Written:
    """Flags that a plan adds to a launch command, and Megatron's flags that it drops.

    Attributes:
        arranging: further flags, for unequal microbatches, which do not change the schedule.
    """

    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    arranging: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """All flags that the plan adds, with their values."""
        return *self.added, *self.arranging

    def __str__(self) -> str:
        """Text for people: ``--pipeline-schedule zb-v, in place of --num-virtual-stages...``."""
        added, dropped = shlex.join(self.added), " ".join(self.dropped)
        if not dropped:
            return added
        return f"{added}, in place of {dropped}" if added else f"drop {dropped}"


NOTHING = Written()


@dataclass(frozen=True, eq=False)
class Alternative:
    """One way to train a job: a schedule with its settings, its seconds and its flags.

    Attributes:
        seconds: seconds of a step, with the optimizer and exposed reductions if these are known.
        write: function that returns its flags. It is called only for what is shown.
        layout: the layers of each stage, if they are not Megatron's own.
        other_steps: seconds of steps with other numbers of microbatches, by number.
    """

    candidate: Candidate
    seconds: float
    write: Callable[[], Written] = field(repr=False)
    layout: str = ""
    other_steps: Mapping[int, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of this alternative: its schedule with its other settings."""
        return candidate_name(self.candidate)

    @property
    def settings(self) -> int:
        """Number of settings of this alternative in addition to its schedule."""
        return len(setting_names(self.candidate)) + bool(self.layout)

    @property
    def holds(self) -> float:
        """Memory of the fullest rank: bytes, or microbatches if no bytes are known."""
        return self.candidate.holds


@dataclass(frozen=True, eq=False)
class Verdict:
    """The recommendation for a training job: to change it, or to keep it as it is.

    Attributes:
        baseline: the unchanged job; None: it cannot run, or nothing is known of it.
        taken: the alternative to train under: ``baseline`` itself if nothing is worth a change.
            None: nothing fits.
        stock: the best change that needs Megatron's own flags alone, if one is worth it.
        tie: other alternatives whose steps are as long as that of ``taken``.
        excess: memory of ``baseline`` beyond what a rank may take; 0: it fits.
        shortest: the shortest step of all other alternatives, taken or not; None: there is none.
        keeps: whether nothing is to be changed.
        gain: the share of the baseline's step that ``taken`` saves; 0 without a baseline.
    """

    baseline: Alternative | None
    taken: Alternative | None
    stock: Alternative | None = None
    tie: tuple[Alternative, ...] = ()
    excess: float = 0.0
    shortest: Alternative | None = None
    keeps: bool = False
    gain: float = 0.0

    def saving_of(self, other: Alternative) -> float:
        """Return the share of the unchanged job's step that the alternative ``other`` saves.

        0 if the unchanged job cannot run.
        """
        if self.baseline is None:
            return 0.0
        return 1 - other.seconds / self.baseline.seconds


def comparison_kinds(one: Alternative, other: Alternative) -> set[ComparisonKind]:
    """Return the ways in which two alternatives differ. These decide how far a predicted ratio of
    their steps may be off."""
    first, second = one.candidate, other.candidate
    kinds = {ComparisonKind.SCHEDULES}
    if one.layout != other.layout or first.report.vpp != second.report.vpp:
        kinds.add(ComparisonKind.LAYOUTS)
    if first.method.vocabulary is not second.method.vocabulary:
        kinds.add(ComparisonKind.VOCABULARY)
    if bool(first.report.pairs) is not bool(second.report.pairs):
        kinds.add(ComparisonKind.OVERLAP)
    return kinds


def spread_of(found: Verdict) -> GainSpread | None:
    """Return how far the predicted gain of a recommendation may be off; None without a gain.

    If only the part that this package's schedules add to Megatron's own flags is within its spread,
    the result is about that part.
    """
    baseline, taken, stock = found.baseline, found.taken, found.stock
    if baseline is None or taken is None or found.gain <= 0:
        return None
    of_gain = GainSpread.of("the gain", found.gain, comparison_kinds(baseline, taken))
    if of_gain.is_within or stock is None or stock is taken or taken.seconds >= stock.seconds:
        return of_gain
    added = 1 - taken.seconds / stock.seconds
    of_ours = GainSpread.of("the part by ours", added, comparison_kinds(stock, taken))
    return of_ours if of_ours.is_within else of_gain


def is_stock(candidate: Candidate) -> bool:
    """Return whether Megatron can run a plan's ``candidate`` by itself, with its own flags."""
    made = candidate.report
    return (
        candidate.family in STOCK
        and candidate.method in (VocabMethod.NAIVE, VocabMethod.REDISTRIBUTED)
        and not made.offloads
        and made.options.recompute == Recompute()
        and made.slices == 1
        and not candidate.overlaps
    )


def verdict_of(
    baseline: Alternative | None, others: Iterable[Alternative], free: float | None = None
) -> Verdict:
    """Return the recommendation for a job: the best of ``baseline``, the unchanged job, and
    ``others``.

    Args:
        others: all alternatives. Only stable schedules are taken, unless none is stable.
        free: bytes that a rank may take; None: not known. ``others`` fit into that.
    """
    pool = list(others)
    stable = eligible(pool)
    excess = 0.0
    if baseline is not None and free is not None and baseline.candidate.fullest is not None:
        excess = max(baseline.candidate.fullest - free, 0.0)
    fits = baseline is not None and not excess
    fitting = baseline if fits else None
    taken, tie = _taken(fitting, stable)
    stock, tie_of_stock = _taken(fitting, [one for one in stable if is_stock(one.candidate)])
    if stock is not None and stock is not fitting and not _adds(taken, stock):
        taken, tie = stock, tie_of_stock
    if stock is fitting:
        stock = None
    shortest = min(stable, key=lambda one: one.seconds, default=None)
    found = Verdict(baseline, taken, stock, tie, excess, shortest)
    if taken is None:
        return found
    return replace(found, keeps=taken is baseline, gain=found.saving_of(taken))


def candidate_name(candidate: Candidate) -> str:
    """Return the name of a candidate in a recommendation: its schedule with its other settings."""
    name, settings = candidate.schedule, setting_names(candidate)
    return f"{name} with {' and '.join(settings)}" if settings else name


def shortest_of_others(found: Verdict) -> str:
    """Return text in brackets that names the shortest other step and the share that it saves.

    "" if it saves nothing.
    """
    shortest = found.shortest
    if shortest is None or found.saving_of(shortest) <= 0:
        return ""
    return f" (the shortest, {shortest.name}, {found.saving_of(shortest):.1%})"


def eligible(pool: Sequence[Alternative]) -> list[Alternative]:
    """Return the alternatives that may be recommended: stable schedules, or all if none is
    stable."""
    return [one for one in pool if stable_of([one.candidate])] or list(pool)


def _adds(taken: Alternative | None, stock: Alternative) -> bool:
    """Return whether ``taken`` is worth more than ``stock``, the best with Megatron's own flags.

    It must save time, or memory in the same time.
    """
    assert taken is not None
    is_shorter = taken.seconds <= (1 - WORTH) * stock.seconds
    is_leaner = taken.holds < (1 - ALIKE) * stock.holds
    return is_shorter or (is_leaner and taken.seconds <= (1 + ALIKE) * stock.seconds)


def _taken(
    baseline: Alternative | None, others: Sequence[Alternative]
) -> tuple[Alternative | None, tuple[Alternative, ...]]:
    """Return the recommended alternative, and those that tie with it.

    ``baseline`` is recommended if no other saves enough.
    """
    worth = [
        one for one in others if baseline is None or one.seconds <= (1 - WORTH) * baseline.seconds
    ]
    if not worth:
        return baseline, ()
    best, *others = tied_for_best(
        worth, lambda one: one.seconds, lambda one: one.holds, lambda one: one.settings
    )
    return best, tuple(others)
