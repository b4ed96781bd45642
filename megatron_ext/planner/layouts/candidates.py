"""Schedules with layouts, made better and compared.

Simulating every layout of every schedule would take hours. So each schedule begins with Megatron's
own layout or a balanced one. The layouts of the best few placements are improved by simulation, and
the best of these are evaluated as they would run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from math import inf

import numpy as np

from megatron_ext.base.progress import Task
from megatron_ext.compile.auto_spec import SEARCHES
from megatron_ext.compile.registry import choose, entry_of
from megatron_ext.planner.candidate import VocabMethod, setting_names, tied_for_best
from megatron_ext.planner.figures import memory_phrase
from megatron_ext.planner.layouts.descent import Start, Timed, descend
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.minimax import (
    least_seconds,
    least_slowest_stage,
    with_even_ranks,
)
from megatron_ext.planner.layouts.recompute import LayerRecompute
from megatron_ext.planner.layouts.stage_figures import End, Figure, StageFigures, busy
from megatron_ext.planner.layouts.work import LONG_STEP, STEADY, Evaluated, Work, evaluate
from megatron_ext.planner.limits import least_step
from megatron_ext.schedule.placement import Placement, is_line_or_v

# Number of placements whose layouts are improved: those with the shortest steps before the
# improvement.
_PLACEMENTS = 3
_EXACTLY = 2  # number of improved layouts whose exact programs are simulated
_NEAR = 0.02  # share of a step by which a layout may be slower, as a search often makes up for it
_NEARLY = 1.05  # layouts that exceed the memory limit by up to this factor are still improved
_TIGHTER = 0.98  # factor on the memory limit for another try if the estimated memory was too low
_ROOMY = 0.9  # the memory limit does not slow a layout that needs less than this share of the limit
_PLAIN = 0.005  # least gain for which a layout is recommended, as a share of a step
_WORTH = 0.01  # least possible gain for which vocabulary parallelism is tried, as a share of a step

# Function that returns a layout for a number of stages, or raises ValueError.
LayoutRule = Callable[[int], Layout]
# Function that raises ValueError for a schedule the launch cannot run.
Permits = Callable[[str, VocabMethod], None]


Layouts = Callable[[Placement, StageFigures], list[Layout]]


class Candidates:
    """Builds and keeps the candidates of a comparison of layouts (layers of each stage).

    A candidate is a schedule with a layout and with recompute of layers, within ``bound`` bytes a
    rank.

    Attributes:
        made: all evaluated candidates, in order.
        about: seconds of a step, by schedule, whether it fits or not.
        refused: reasons why schedules cannot be made.
        not_permitted: reasons why schedules are not permitted.

    Args:
        works: the same training with each kind of recompute.
        rule: the layout that Megatron makes by itself.
        permits: raises ValueError for a schedule that is not permitted.
        search: as in `compare_layouts`.
    """

    def __init__(
        self,
        works: Sequence[Work],
        bound: float | None,
        rule: LayoutRule,
        permits: Permits,
        search: bool,
        progress: Task,
    ) -> None:
        self._work, self._bound, self._rule = works[0], bound, rule
        self._permits, self._search, self._progress = permits, search, progress
        self._figures = sorted(map(StageFigures, works), key=_least_work)
        self._separating = [
            StageFigures(work, separates_prediction=True)
            for work in works
            if work.may_separate_prediction
        ]
        self._separating.sort(key=_least_work)
        self._orders: dict[str, Timed] = {}
        self._dividing: list[tuple[str, LayerRecompute]] = []
        self.made: list[Evaluated] = []
        self.about: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self.not_permitted: dict[str, str] = {}

    def by_rule(self, specs: Iterable[str]) -> list[Evaluated]:
        """Return the best of the schedules ``specs``, each with Megatron's own layout."""
        starts = [self._start([spec], self._by_rule, self._figures) for spec in specs]
        made = self._exactly([start for start in starts if start], 1)
        self._tell(made)
        return made

    def by_layout(
        self, ladders: Iterable[Sequence[str]], known: Sequence[Evaluated]
    ) -> list[Evaluated]:
        """Return the best schedules with any layers on their stages, shortest step first.

        The layouts of the ``known`` candidates are among those that are improved.

        Args:
            ladders: schedules of one placement each, from those that hold most memory to those that
                hold least; the first that fits counts.
        """

        def layouts(placement: Placement, figures: StageFigures) -> list[Layout]:
            if figures.separates_prediction and not _has_prediction_stage(placement):
                return []
            layers, microbatches = len(self._work.model.layers), self._work.microbatches
            made: list[Layout] = []
            for balanced_by in dict.fromkeys([figures, figures.after_overlap]):
                balanced = least_slowest_stage(layers, placement, balanced_by)
                even = with_even_ranks(balanced, placement, microbatches, balanced_by)
                made += [even, balanced]
            of_known = [
                figures.layout(candidate.layout.layers)
                for candidate in known
                if candidate.layout.stages == placement.stages
            ]
            return list(dict.fromkeys([*made, *self._by_rule(placement, figures), *of_known]))

        tried = (
            self._start(list(self._permitted(ladder)), layouts, of_kind)
            for ladder in ladders
            for of_kind in (self._figures, self._separating)
        )
        starts = [start for start in tried if start]
        self._dividing = [(start.spec, start.figures.work.recompute) for start in starts]
        ahead = sorted(starts, key=_about)[:_PLACEMENTS]
        made = self._exactly([self._descended(start) for start in ahead], _EXACTLY)
        self._tell([*known, *made])
        return sorted(made, key=_seconds)

    def further(self, made: Sequence[Evaluated], baseline: Evaluated) -> list[Evaluated]:
        """Return candidates from searches on the layouts of ``made``, and with split vocabulary.

        The layout of ``baseline``, the launch command, is searched too.
        """
        more: list[Evaluated] = []
        near = self._worth_more(made)
        is_among = any(
            (other.layout, other.recompute) == (baseline.layout, baseline.recompute)
            for other in near
        )
        for candidate in [*near, *([] if is_among else [baseline])]:
            best = min([baseline, *made, *more], key=_seconds).seconds
            more += self._searched(candidate, best, is_near=candidate is not baseline)
            self._tell([*made, *more])
        of_near = [(candidate.schedule, candidate.recompute) for candidate in near]
        for spec, recompute in dict.fromkeys([*of_near, *self._dividing]):
            more += self._divided(
                spec, recompute, min([baseline, *made, *more], key=_seconds).seconds
            )
            self._tell([*made, *more])
        return more

    def _searched(self, candidate: Evaluated, best: float, *, is_near: bool) -> list[Evaluated]:
        """Return candidates that searches find with the layout of ``candidate``.

        If the candidate's step ``is_near`` the ``best`` one, the schedules are searched; otherwise
        they are made without a search. Schedules that cannot be shorter than ``best`` are not
        returned.
        """
        placement = choose(candidate.schedule).place(self._work.ranks)
        chunks, work = candidate.candidate.report.vpp, self._of(candidate.recompute).work
        specs = [
            search.spec
            for search in SEARCHES
            if (search.placement, search.chunks) == (placement.name, chunks)
        ]
        microbatches = min(self._work.microbatches, STEADY * placement.ranks)
        if not self._search and placement.stages * microbatches > LONG_STEP:
            return []
        return self._evaluated(
            [
                (spec, candidate.layout, candidate.recompute)
                for spec in self._permitted(specs)
                if least_step(work.variant(spec, candidate.layout), self._bound) < best
            ],
            search=self._search and is_near,
            better_than=best,
        )

    def _worth_more(self, made: Sequence[Evaluated]) -> list[Evaluated]:
        """Return the candidates of ``made`` to search: those whose steps are about as short as the
        first.

        If searches take long, only the one with the fewest stages is returned.
        """
        near = [
            candidate for candidate in made if candidate.seconds <= (1 + _NEAR) * made[0].seconds
        ]
        near.sort(key=lambda candidate: candidate.layout.stages)
        stages = sum(candidate.layout.stages for candidate in near)
        is_quick = self._search and stages * self._work.microbatches <= LONG_STEP
        return near if is_quick else near[:1]

    def _by_rule(self, placement: Placement, figures: StageFigures) -> list[Layout]:
        if figures.separates_prediction:
            return []
        try:
            return [self._rule(placement.stages)]
        except ValueError:  # the layers cannot be split evenly
            return []

    def _divided(self, spec: str, recompute: LayerRecompute, best: float) -> list[Evaluated]:
        """Return the schedule ``spec`` with the vocabulary split over all ranks.

        The stages then have only layers. The result is empty if that is impossible. It is also
        empty if the gain over the ``best`` step would be small even in the best case: all ranks
        have the same work, and the first microbatch reaches the last rank without waiting.
        """
        placement, figures = choose(spec).place(self._work.ranks), self._of(recompute)
        layers = len(self._work.model.layers)
        all_layers = figures.piece(0, layers, is_first=True, behind=End.LOSS)
        share = (
            self._work.microbatches * busy(all_layers) / sum(self._work.speeds or [placement.ranks])
        )
        arrival = (placement.ranks - 1) * all_layers[Figure.FORWARD] / placement.stages
        if not is_line_or_v(placement) or share + arrival > (1 - _WORTH) * best:
            return []
        layout = least_slowest_stage(layers, placement, figures, with_ends=False)
        made = []
        for method in (VocabMethod.ONE, VocabMethod.TWO):
            with contextlib.suppress(ValueError):
                self._permits(spec, method)
                made.append(self._evaluate(figures.work, spec, layout, method))
        return made

    def _of(self, recompute: LayerRecompute) -> StageFigures:
        return next(f for f in self._figures if f.work.recompute == recompute)

    def _start(
        self, ladder: Sequence[str], layouts: Layouts, by_recompute: Sequence[StageFigures]
    ) -> Start | None:
        """Return the schedule of ``ladder`` with the shortest step, and its best recompute setting.

        ``ladder`` has schedules of one placement, the one that stores most activations first.

        The recompute that takes the least time is tried first, and if memory limits nothing, no
        other is tried.
        """
        best: Start | None = None
        for figures in by_recompute:
            start = self._start_by(figures, ladder, layouts, best)
            best = min(filter(None, (best, start)), key=_about, default=None)
            if start and start.spec == ladder[0] and start.fullest < _ROOMY:
                break
        return best

    def _start_by(
        self, figures: StageFigures, ladder: Sequence[str], layouts: Layouts, known: Start | None
    ) -> Start | None:
        """Return the first schedule of ``ladder`` that fits into memory, with the best of its
        layouts.

        A schedule before it that nearly fits is returned instead if it is better after layers were
        moved until it fits. None if it takes more time than the ``known`` result anyway.
        """
        made: list[Start] = []
        for spec in ladder:
            placement = choose(spec).place(self._work.ranks)
            options = layouts(placement, figures)
            if not options:
                break
            counts = np.array([layout.layers for layout in options], dtype=np.int64)
            balanced_by, microbatches = figures.after_overlap, self._work.microbatches
            least = least_seconds(counts, placement, microbatches, balanced_by).min()
            if known and known.fits and known.seconds <= least:
                break
            with self._refusing(spec):
                start = self._timed(spec, options[0], figures).best_of(options)
                self.about[spec] = min(start.seconds, self.about.get(spec, inf))
                made.append(start)
                if start.fits:
                    break
                if start.fullest < _NEARLY:
                    made.append(self._descended(start))
            self._progress.done += 1
        return min(made, key=_about, default=None)

    def _timed(self, spec: str, layout: Layout, figures: StageFigures) -> Timed:
        """Return the order of passes of schedule ``spec``, made for ``layout`` if needed, which
        times layouts with the seconds and bytes in ``figures``."""
        if spec in self._orders:
            return self._orders[spec].by(figures)
        timed = Timed(spec, layout, figures, self._bound)
        if not (entry_of(spec).traits.uses_costs or figures.work.pairs):
            self._orders[spec] = timed
        return timed

    def _permitted(self, specs: Iterable[str]) -> Iterator[str]:
        for spec in specs:
            try:
                self._permits(spec, VocabMethod.NAIVE)
            except ValueError as error:
                self.not_permitted[spec] = str(error)
                continue
            yield spec

    def _descended(self, start: Start, share: float = 1.0) -> Start:
        """Return ``start`` with layers moved between stages until no move makes the step shorter.

        If Megatron's own layout is about as good, that layout is returned. Memory is limited to a
        ``share`` of the bound.
        """

        @cache
        def in_share(timed: Timed) -> Timed:
            return timed if share == 1 else timed.in_less(share)

        def make(layout: Layout) -> Timed:
            return in_share(self._timed(start.spec, layout, start.figures))

        try:
            made = descend(make, start.layout, self._progress)
            placement = choose(start.spec).place(self._work.ranks)
            for plain in self._by_rule(placement, start.figures):
                of_plain = make(plain).best_of([plain])
                if of_plain.fits and of_plain.seconds < (1 + _PLAIN) * made.seconds:
                    return of_plain
        except ValueError:  # the order of passes was made for another layout
            return start
        return made

    def _exactly(self, starts: Sequence[Start], number: int) -> list[Evaluated]:
        """Return the ``number`` fastest of ``starts``, each evaluated as it would run."""
        made: list[Evaluated] = []
        for start in sorted(starts, key=_about):
            if not start.fits or len(made) == number or self._is_far(start, made):
                break
            of_start = self._of_start(start)
            if not of_start:  # the messages of the program take more memory than was estimated
                tighter = self._descended(start, _TIGHTER)
                if tighter.fits:
                    of_start = self._of_start(tighter)
            made += of_start
        return made

    def _is_far(self, start: Start, made: Sequence[Evaluated]) -> bool:
        """Return whether ``start`` is a long step and clearly slower than the best of ``made``."""
        is_long = start.layout.stages * self._work.microbatches > LONG_STEP
        best = min(map(_seconds, made), default=inf)
        return is_long and start.seconds > (1 + _NEAR) * best

    def _of_start(self, start: Start) -> list[Evaluated]:
        return self._evaluated([(start.spec, start.layout, start.figures.work.recompute)])

    def _evaluated(
        self,
        wanted: Iterable[tuple[str, Layout, LayerRecompute]],
        *,
        search: bool | None = None,
        better_than: float = inf,
    ) -> list[Evaluated]:
        """Return the evaluated candidates of ``wanted``, except those that cannot be made.

        ``wanted`` has the schedule, layout and recompute of each.

        Args:
            search: None: as in `compare_layouts`.
            better_than: as in `evaluate`.
        """
        made = []
        for spec, layout, recompute in wanted:
            work = self._of(recompute).work
            with self._refusing(spec):
                made.append(
                    self._evaluate(work, spec, layout, search=search, better_than=better_than)
                )
        return made

    def _evaluate(
        self,
        work: Work,
        spec: str,
        layout: Layout,
        method: VocabMethod = VocabMethod.NAIVE,
        *,
        search: bool | None = None,
        better_than: float = inf,
    ) -> Evaluated:
        self._progress.done += 1
        search = self._search if search is None else search
        made = evaluate(
            work, spec, layout, method, self._bound, search=search, better_than=better_than
        )
        self.made.append(made)
        return made

    @contextlib.contextmanager
    def _refusing(self, spec: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            self.refused[spec] = str(error)

    def _tell(self, made: Sequence[Evaluated]) -> None:
        if made:
            best = leanest_of(made)
            self._progress.found = (
                f"so far the best is {best.schedule} with {best.layout.text()}: "
                f"{best.seconds:.4g} s a step, {memory_phrase(best.candidate)}"
            )


def leanest_of(made: Sequence[Evaluated]) -> Evaluated:
    """Return the candidate of ``made`` with the shortest step; of a tie, that with least memory.

    Of equally lean ones it is the one with the fewest settings. ``made`` is not empty.
    """
    return tied_for_best(made, _seconds, _holds, _settings)[0]


def _holds(made: Evaluated) -> float:
    return made.candidate.holds


def _has_prediction_stage(placement: Placement) -> bool:
    """Return whether multi-token prediction can have a stage of its own, before the last stage.

    That stage must be on another rank than the first stage, as Megatron's loops have no other copy
    of the embedding there.
    """
    return placement.stages > 2 and placement.rank_of[-2] != placement.rank_of[0]


def _settings(made: Evaluated) -> int:
    return len(setting_names(made.candidate))


def _least_work(figures: StageFigures) -> float:
    """Return the seconds of one microbatch's passes summed over all layers, each timed as a stage
    of its own."""
    layers = len(figures.work.model.layers)
    return sum(float(busy(figures.piece(n, n + 1))) for n in range(layers))


def _about(start: Start) -> tuple[bool, float]:
    return not start.fits, start.seconds


def _seconds(made: Evaluated) -> float:
    return made.seconds
