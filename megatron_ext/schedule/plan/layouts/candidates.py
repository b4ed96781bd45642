"""Schedules with layouts, made better and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

from megatron_ext.schedule.build.auto_spec import SEARCHES
from megatron_ext.schedule.build.registry import choose, entry_of
from megatron_ext.schedule.placement import Placement, is_line_or_v
from megatron_ext.schedule.plan.layouts.descent import Start, Timed, descend
from megatron_ext.schedule.plan.layouts.figures import StageFigures
from megatron_ext.schedule.plan.layouts.layout import Layout
from megatron_ext.schedule.plan.layouts.minimax import least_slowest_stage, with_even_ranks
from megatron_ext.schedule.plan.layouts.work import MANY, Evaluated, Work, evaluate
from megatron_ext.schedule.plan.planner import VocabMethod
from megatron_ext.schedule.progress import Task

_PLACEMENTS = 3  # whose layouts are made better: those where a step takes least before
_EXACTLY = 2  # of those, which are simulated as they would run
_SMALL = 2600  # microbatches on a stage, of what a search knows at once in some seconds
_NEAR = 0.02  # of a step: what a search may well make up for
_NEARLY = 1.05  # of what fits
_TIGHTER = 0.98  # of what fits, where an estimate was too low
_PLAIN = 0.005  # of a step: what a layout has to gain to be written
_WORTH = 0.01  # of a step: what a divided vocabulary has to be able to gain

Rule = Callable[[int], Layout]  # the layout of so many stages; raises ValueError
Permits = Callable[[str, VocabMethod], None]  # raises ValueError


class Candidates:
    """Schedules and layouts within ``bound`` bytes of a rank.

    Attributes:
        about: seconds of a step, by schedule, whether it fits or not.
        refused: why schedules cannot be made.
        barred: why schedules are not permitted.

    Args:
        rule: the layout that Megatron makes by itself.
        permits: asked of each schedule.
        search: as of `compare_layouts`.
    """

    def __init__(
        self,
        work: Work,
        bound: float | None,
        rule: Rule,
        permits: Permits,
        search: bool,
        progress: Task,
    ) -> None:
        self._work, self._bound, self._rule = work, bound, rule
        self._permits, self._search, self._progress = permits, search, progress
        self._figures = StageFigures(work)
        self._orders: dict[str, Timed] = {}
        self.about: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self.barred: dict[str, str] = {}

    def by_rule(self, specs: Iterable[str]) -> list[Evaluated]:
        """The best of ``specs`` with Megatron's own layouts."""
        starts = [self._start([spec], self._by_rule) for spec in specs]
        made = self._exactly([start for start in starts if start], 1)
        self._tell(made)
        return made

    def by_layout(
        self, ladders: Iterable[Sequence[str]], known: Sequence[Evaluated]
    ) -> list[Evaluated]:
        """The best with any layout, shortest first. Layouts of what is ``known`` are among those
        that are made better.

        Args:
            ladders: schedules of one placement each, from those that hold most to those that hold
                least; the first that fits counts.
        """

        def layouts(placement: Placement) -> list[Layout]:
            balanced = least_slowest_stage(
                len(self._work.model.layers), placement.stages, self._figures
            )
            even = with_even_ranks(balanced, placement, self._work.microbatches, self._figures)
            of_known = [
                candidate.layout
                for candidate in known
                if candidate.layout.stages == placement.stages
            ]
            return list(dict.fromkeys([even, balanced, *self._by_rule(placement), *of_known]))

        starts = [self._start(list(self._permitted(ladder)), layouts) for ladder in ladders]
        ahead = sorted((start for start in starts if start), key=_about)[:_PLACEMENTS]
        made = self._exactly([self._descended(start) for start in ahead], _EXACTLY)
        self._tell([*known, *made])
        return sorted(made, key=_seconds)

    def further(self, made: Sequence[Evaluated]) -> list[Evaluated]:
        """What searches find with the layouts of ``made``, and what schedules take with the
        vocabulary divided."""
        more: list[Evaluated] = []
        for candidate in self._worth_more(made):
            report = candidate.candidate.report
            placement = choose(candidate.schedule).place(self._work.ranks)
            searches = [
                search.spec
                for search in SEARCHES
                if (search.placement, search.chunks) == (placement.name, report.vpp)
            ]
            microbatches = min(self._work.microbatches, MANY * placement.ranks)
            is_small = placement.stages * microbatches <= _SMALL
            if self._search or is_small:
                pairs = [(spec, candidate.layout) for spec in self._permitted(searches)]
                more += self._evaluated(pairs)
            if is_line_or_v(placement):
                more += self._divided(candidate, placement)
            self._tell([*made, *more])
        return more

    def _worth_more(self, made: Sequence[Evaluated]) -> list[Evaluated]:
        """Those of ``made`` that are about as good as the first; where searches take long, the one
        with the fewest stages of these."""
        near = [
            candidate for candidate in made if candidate.seconds <= (1 + _NEAR) * made[0].seconds
        ]
        near.sort(key=lambda candidate: candidate.layout.stages)
        stages = sum(candidate.layout.stages for candidate in near)
        is_quick = self._search and stages * self._work.microbatches <= _SMALL
        return near if is_quick else near[:1]

    def _by_rule(self, placement: Placement) -> list[Layout]:
        try:
            return [self._rule(placement.stages)]
        except ValueError:  # layers do not divide so
            return []

    def _divided(self, candidate: Evaluated, placement: Placement) -> list[Evaluated]:
        """The schedule of ``candidate`` with the vocabulary divided, which leaves layers alone on
        the stages; nothing where even work would gain little."""
        at_best = self._work.microbatches * sum(candidate.work) / placement.ranks
        if at_best > (1 - _WORTH) * candidate.seconds:
            return []
        layout = least_slowest_stage(
            len(self._work.model.layers), placement.stages, self._figures, with_ends=False
        )
        made = []
        for method in (VocabMethod.ONE, VocabMethod.TWO):
            with contextlib.suppress(ValueError):
                self._permits(candidate.schedule, method)
                made.append(self._evaluate(candidate.schedule, layout, method))
        return made

    def _start(
        self, ladder: Sequence[str], layouts: Callable[[Placement], list[Layout]]
    ) -> Start | None:
        """The first of ``ladder`` that fits, with the best of its ``layouts``; or one before that
        nearly does, if that is better when layers are moved until it does."""
        made: list[Start] = []
        for spec in ladder:
            options = layouts(choose(spec).place(self._work.ranks))
            if not options:
                break
            with self._refusing(spec):
                start = self._timed(spec, options[0]).best_of(options)
                self.about[spec] = start.seconds
                made.append(start)
                if start.fits:
                    break
                if start.fullest < _NEARLY:
                    made.append(self._descended(start))
            self._progress.done += 1
        return min(made, key=_about, default=None)

    def _timed(self, spec: str, layout: Layout) -> Timed:
        """The order of passes of ``spec`` with ``layout``."""
        if spec in self._orders:
            return self._orders[spec]
        timed = Timed(self._work, spec, layout, self._figures, self._bound)
        if not entry_of(spec).uses_costs:
            self._orders[spec] = timed
        return timed

    def _permitted(self, specs: Iterable[str]) -> Iterator[str]:
        for spec in specs:
            try:
                self._permits(spec, VocabMethod.NAIVE)
            except ValueError as error:
                self.barred[spec] = str(error)
                continue
            yield spec

    def _descended(self, start: Start, share: float = 1.0) -> Start:
        """``start`` with layers moved; Megatron's own layout where that is about as good. Within so
        large a ``share`` of the bound."""

        @cache
        def in_share(timed: Timed) -> Timed:
            return timed if share == 1 else timed.in_less(share)

        def make(layout: Layout) -> Timed:
            return in_share(self._timed(start.spec, layout))

        try:
            made = descend(make, start.layout, self._progress)
            placement = choose(start.spec).place(self._work.ranks)
            for plain in self._by_rule(placement):
                of_plain = make(plain).best_of([plain])
                if of_plain.fits and of_plain.seconds < (1 + _PLAIN) * made.seconds:
                    return of_plain
        except ValueError:  # of an order for another layout
            return start
        return made

    def _exactly(self, starts: Sequence[Start], number: int) -> list[Evaluated]:
        """So many of ``starts``, those that take least, as they would run."""
        made: list[Evaluated] = []
        for start in sorted(starts, key=_about):
            if not start.fits or len(made) == number:
                break
            of_start = self._evaluated([(start.spec, start.layout)])
            if not of_start:  # messages hold more than is estimated
                tighter = self._descended(start, _TIGHTER)
                if tighter.fits:
                    of_start = self._evaluated([(start.spec, tighter.layout)])
            made += of_start
        return made

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
    ) -> Evaluated:
        self._progress.done += 1
        return evaluate(self._work, spec, layout, method, self._bound, search=self._search)

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
                f"so far the best is {best.schedule} with {best.layout.text()}: "
                f"{best.seconds:.4g} s a step"
            )


def _about(start: Start) -> tuple[bool, float]:
    return not start.fits, start.seconds


def _seconds(made: Evaluated) -> float:
    return made.seconds
