"""Schedules with layouts, made better and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.schedule.build.auto_spec import SEARCHES
from megatron_ext.schedule.build.registry import choose
from megatron_ext.schedule.placement import Placement, is_line_or_v
from megatron_ext.schedule.plan.layouts.descent import Timed, descend
from megatron_ext.schedule.plan.layouts.figures import StageFigures
from megatron_ext.schedule.plan.layouts.layout import Layout
from megatron_ext.schedule.plan.layouts.minimax import least_slowest_stage, with_even_ranks
from megatron_ext.schedule.plan.layouts.work import Evaluated, Work, evaluate
from megatron_ext.schedule.plan.planner import VocabMethod
from megatron_ext.schedule.progress import Task

_PLACEMENTS = 3  # whose layouts are made better: those where a step takes least before
_LAST = 2  # of what has been made better: what is searched, and divides the vocabulary

Rule = Callable[[int], Layout]  # the layout of so many stages; raises ValueError
Permits = Callable[[str, VocabMethod], None]  # raises ValueError


@dataclass(frozen=True)
class _Start:
    """A schedule with the layout that it is made better from, and about what that takes."""

    spec: str
    placement: Placement
    layout: Layout
    seconds: float


class Candidates:
    """Schedules and layouts within ``bound`` bytes of a rank.

    Attributes:
        refused: why schedules cannot be made.
        barred: why schedules are not permitted.

    Args:
        rule: the layout that Megatron makes by itself.
        permits: asked of each schedule.
    """

    def __init__(
        self,
        work: Work,
        bound: float | None,
        rule: Rule,
        permits: Permits,
        progress: Task,
    ) -> None:
        self._work, self._bound, self._rule = work, bound, rule
        self._permits, self._progress = permits, progress
        self._figures = StageFigures(work)
        self.refused: dict[str, str] = {}
        self.barred: dict[str, str] = {}

    def by_rule(self, specs: Iterable[str]) -> list[Evaluated]:
        """The best of ``specs`` with Megatron's own layouts."""
        starts = self._starts(specs, self._by_rule)
        return self._evaluated((start.spec, start.layout) for start in starts[:_PLACEMENTS])

    def by_layout(self, specs: Iterable[str], known: Sequence[Evaluated]) -> list[Evaluated]:
        """The best of ``specs`` with any layout. Those of what is ``known`` are among the layouts
        that are made better."""

        def layouts(placement: Placement) -> list[Layout]:
            balanced = least_slowest_stage(
                len(self._work.model.layers), placement.stages, self._figures
            )
            even = with_even_ranks(balanced, placement, self._work.microbatches, self._figures)
            of_known = [one.layout for one in known if one.layout.stages == placement.stages]
            return list(dict.fromkeys([even, balanced, *self._by_rule(placement), *of_known]))

        made: list[Evaluated] = []
        for start in _best_of_each(self._starts(specs, layouts))[:_PLACEMENTS]:
            better = self._descended(start)
            made += self._evaluated(
                (start.spec, layout) for layout in dict.fromkeys([better, start.layout])
            )
            self._tell([*known, *made])
        return sorted(made, key=_seconds)

    def further(self, made: Sequence[Evaluated], *, search: bool) -> list[Evaluated]:
        """What searches take with the layouts that the best of ``made`` have, and what schedules do
        with the vocabulary divided.

        Args:
            search: as of `compare_layouts`.
        """
        more: list[Evaluated] = []
        for candidate in _best_of_placements(made)[:_LAST]:
            report = candidate.candidate.report
            placement = choose(candidate.schedule).place(self._work.ranks)
            searches = [
                found.spec
                for found in SEARCHES
                if (found.placement, found.chunks) == (placement.name, report.vpp)
            ]
            for spec in self._permitted(searches):
                with self._refusing(spec):
                    more.append(self._evaluate(spec, candidate.layout, search=search))
            if is_line_or_v(placement):
                more += self._divided(candidate.schedule, placement)
            self._tell([*made, *more])
        return more

    def _by_rule(self, placement: Placement) -> list[Layout]:
        try:
            return [self._rule(placement.stages)]
        except ValueError:  # layers do not divide so
            return []

    def _divided(self, spec: str, placement: Placement) -> list[Evaluated]:
        """``spec`` with the vocabulary divided, which leaves layers alone on the stages."""
        layout = least_slowest_stage(
            len(self._work.model.layers), placement.stages, self._figures, with_ends=False
        )
        made = []
        for method in (VocabMethod.ONE, VocabMethod.TWO):
            with contextlib.suppress(ValueError):
                self._permits(spec, method)
                made.append(self._evaluate(spec, layout, method))
        return made

    def _starts(
        self, specs: Iterable[str], layouts: Callable[[Placement], list[Layout]]
    ) -> list[_Start]:
        """Each of ``specs`` with the best of its ``layouts``, what takes least first."""
        starts = []
        for spec in self._permitted(specs):
            with self._refusing(spec):
                placement = choose(spec).place(self._work.ranks)
                if options := layouts(placement):
                    timed = Timed(self._work, spec, options[0], self._figures, self._bound)
                    starts.append(_Start(spec, placement, *timed.best_of(options)))
            self._progress.done += 1
        return sorted(starts, key=lambda start: start.seconds)

    def _permitted(self, specs: Iterable[str]) -> Iterator[str]:
        for spec in specs:
            try:
                self._permits(spec, VocabMethod.NAIVE)
            except ValueError as error:
                self.barred[spec] = str(error)
                continue
            yield spec

    def _descended(self, start: _Start) -> Layout:
        try:
            return descend(
                self._work, start.spec, start.layout, self._figures, self._bound, self._progress
            )
        except ValueError:  # of an order for another layout
            return start.layout

    def _evaluated(self, pairs: Iterable[tuple[str, Layout]]) -> list[Evaluated]:
        made = []
        for spec, layout in pairs:
            with self._refusing(spec):
                made.append(self._evaluate(spec, layout))
        return made

    def _evaluate(
        self,
        spec: str,
        layout: Layout,
        method: VocabMethod = VocabMethod.NAIVE,
        *,
        search: bool = False,
    ) -> Evaluated:
        self._progress.done += 1
        return evaluate(self._work, spec, layout, method, self._bound, search=search)

    @contextlib.contextmanager
    def _refusing(self, spec: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            self.refused[spec] = str(error)

    def _tell(self, made: Sequence[Evaluated]) -> None:
        best = min(made, key=_seconds, default=None)
        if best is not None:
            self._progress.found = (
                f"the best so far is {best.schedule}, {best.seconds:.3g} s a step"
            )


def _seconds(made: Evaluated) -> float:
    return made.seconds


def _best_of_each(starts: Sequence[_Start]) -> list[_Start]:
    """The first of ``starts`` on each placement."""
    best: dict[Placement, _Start] = {}
    for start in starts:
        best.setdefault(start.placement, start)
    return list(best.values())


def _best_of_placements(made: Sequence[Evaluated]) -> list[Evaluated]:
    """The one of ``made`` that takes least for each number of stages and kind of placement."""
    best: dict[tuple[int, str], Evaluated] = {}
    for candidate in sorted(made, key=_seconds):
        report = candidate.candidate.report
        place = choose(candidate.schedule).place(report.pp)
        best.setdefault((place.stages, place.name), candidate)
    return list(best.values())
