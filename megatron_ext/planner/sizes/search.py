"""The search over parallel sizes: estimates for all, simulated schedules for the best of them, and
layouts for the best few. Offload and slices are then tried for steps that would be shorter but do
not fit, and schedules are searched.

Four kinds of candidates are searched side by side, so that each has a best of its own: Megatron's
schedules or any, with all sizes or only with sizes whose estimate is checked (`adds_unchecked`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from math import inf

from megatron_ext.base.progress import Task, remark, task
from megatron_ext.compile.auto_spec import SEARCHES
from megatron_ext.compile.registry import choose
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.layouts.candidates import LayoutRule, Permits
from megatron_ext.planner.layouts.comparison import compare_layouts, permit_all
from megatron_ext.planner.layouts.descent import Timed
from megatron_ext.planner.layouts.layout import Layout, evenly
from megatron_ext.planner.layouts.minimax import least_slowest_stage, with_even_ranks
from megatron_ext.planner.layouts.recompute import LayerRecompute
from megatron_ext.planner.layouts.stage_figures import StageFigures
from megatron_ext.planner.layouts.work import Evaluated, Work, evaluate
from megatron_ext.planner.limits import least_step
from megatron_ext.planner.long_sequences import COUNTS, WORTH_SLICES, may_gain_by_joining
from megatron_ext.planner.planning_time import answered, until_end, within
from megatron_ext.planner.sizes.described_job import SizedJob
from megatron_ext.planner.sizes.estimated_order import Estimated, Estimator, amount_of
from megatron_ext.planner.sizes.sizes import Sizes
from megatron_ext.planner.sizes.space import space
from megatron_ext.planner.verdict import is_stock
from megatron_ext.schedule.problem import VocabularyParallel
from megatron_ext.schedule.slices import Lengths, Slices

SIMULATED = 100  # number of candidates for which schedules are simulated
FIRST = 10  # number of simulated candidates after which a first result is available
_OF_SIZES = 2  # largest number of candidates of one kind that share their parallel sizes
_FAR = 1.3  # sizes are simulated if their estimate is within this factor of the best estimate
_NODE = 8  # number of GPUs in a node
# Shares of the planning time after which each phase ends: simulation, evaluation, layouts, offload
# with slices, and searches.
_SIMULATION, _EVALUATION, _LAYOUTS, _FITTING, _SEARCHES = 0.35, 0.45, 0.7, 0.8, 0.85
_OFFLOADED = 6  # number of candidates that only fit with offload and are tried with it
_SLICED = ("1f1b", "zb-h1", "zb-v")  # schedules that are compared with slices of sequences


@dataclass(frozen=True)
class SizedWorks:
    """A training job with fixed parallel sizes, for the comparison of its layouts.

    Attributes:
        works: the training with each recompute of layers.
        rule: the layout that Megatron makes by itself.
        permits: raises ValueError for a schedule that may not be taken.
    """

    works: Sequence[Work]
    rule: LayoutRule
    permits: Permits = permit_all


# Function of parallel sizes that raises ValueError if a launch would refuse them.
WorksOf = Callable[[Sizes], SizedWorks]


@dataclass(frozen=True)
class SizedStep:
    """Simulated training step with certain parallel sizes, schedule, layout and recompute."""

    sizes: Sizes
    made: Evaluated

    @property
    def seconds(self) -> float:
        return self.made.seconds

    @cached_property
    def is_stock(self) -> bool:
        """Whether this step needs only Megatron's own flags, and none of ours."""
        return is_stock(self.made.candidate)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Parts of the step (offload, slices) whose estimate no measurement has checked."""
        report = self.made.candidate.report
        is_used = {"offload": report.offloads, "slices": report.slices > 1}
        return tuple(part for part, used in is_used.items() if used)

    def adds_unchecked(self, job: SizedJob) -> bool:
        """Return whether this step has unchecked parts that ``job`` itself does not have.

        A part is unchecked if no measurement has checked its estimate.
        """
        return bool(self.unchecked) or adds_unchecked(job, self.sizes)


@dataclass
class Found:
    """Results of a search over parallel sizes.

    Attributes:
        steps: all steps that fit into memory.
        refused: reasons why sizes are not among them.
        compared: number of sizes that were estimated.
        is_complete: whether all possible sizes were estimated.
    """

    steps: list[SizedStep] = field(default_factory=list)
    refused: dict[Sizes, str] = field(default_factory=dict)
    compared: int = 0
    is_complete: bool = False

    def best(self, kind: CandidateKind) -> SizedStep | None:
        """Return the shortest step of a ``kind`` of candidates; None if there is none."""
        steps = (
            step
            for step in self.steps
            if kind.has(step.sizes, is_stock=step.is_stock)
            and not (kind.only_checked and step.unchecked)
        )
        return min(steps, key=lambda step: step.seconds, default=None)


@dataclass(frozen=True)
class CandidateKind:
    """Kind of candidates in a search over parallel sizes; each kind has a best step of its own.

    Attributes:
        only_stock: whether only Megatron's schedules count.
        only_checked: whether only sizes and schedules count whose estimate is checked.
    """

    job: SizedJob
    only_stock: bool
    only_checked: bool

    def has(self, sizes: Sizes, *, is_stock: bool) -> bool:
        """Return whether a step with these parallel ``sizes`` is of this kind."""
        if self.only_stock and not is_stock:
            return False
        return not (self.only_checked and adds_unchecked(self.job, sizes))

    def has_estimated(self, candidate: Estimated) -> bool:
        """Return whether an estimated ``candidate`` is of this kind."""
        return self.has(candidate.sizes, is_stock=candidate.is_stock)


def adds_unchecked(job: SizedJob, sizes: Sizes) -> bool:
    """Return whether the estimate for ``sizes`` has unchecked parts that the job's own sizes lack.

    No measurement has checked context parallelism and experts across nodes.
    """
    job_sizes = job.sizes
    crosses = sizes.expert > 1 and sizes.expert * sizes.expert_tensor > _NODE
    same_experts = (sizes.expert, sizes.expert_tensor) == (
        job_sizes.expert,
        job_sizes.expert_tensor,
    )
    return sizes.context not in (1, job_sizes.context) or (crosses and not same_experts)


def kinds_of(job: SizedJob) -> list[CandidateKind]:
    """Return all kinds of candidates in a search over parallel sizes, the most restricted one
    first."""
    return [
        CandidateKind(job, only_stock, only_checked)
        for only_checked in (True, False)
        for only_stock in (True, False)
    ]


def search_sizes(job: SizedJob, works_of: WorksOf) -> Found:
    """Search the best parallel sizes, schedules, layouts and recompute of ``job``.

    Within `planning` the search ends with the planning time, or at Ctrl-C, and has what it found
    until then. The job's own sizes are searched as all others.
    """
    search = _Search(job, works_of)
    with task("comparing parallel sizes") as progress:
        with within(_SIMULATION):
            until_end(partial(search.simulate, progress), None)
        with within(_EVALUATION):
            until_end(search.evaluate, None)
        # If the time ends early, the best simulated candidate is the result.
        if not search.found.steps:
            search.evaluate(1)
    with task("laying out stages of the best sizes"), within(_LAYOUTS):
        until_end(search.lay_out, None)
    with task("comparing offload and slices"), within(_FITTING):
        until_end(search.offload, None)
        until_end(search.slice, None)
    with task("searching schedules for the best sizes"), within(_SEARCHES):
        until_end(search.search_schedules, None)
    return search.found


class _Search:
    def __init__(self, job: SizedJob, works_of: WorksOf) -> None:
        self.found = Found()
        self._job, self._works_of = job, works_of
        self._kinds = kinds_of(job)
        self._figures: dict[tuple[Sizes, LayerRecompute], StageFigures] = {}
        self._sized: dict[Sizes, SizedWorks | None] = {}
        self._simulated: list[tuple[Estimated, Layout, float]] = []
        self._too_full: list[Estimated] = []

    def simulate(self, progress: Task) -> None:
        """Estimate all parallel sizes, and simulate the schedules of the best."""
        estimator, estimated, shortest = Estimator(self._job), list[Estimated](), inf
        bounds = {sizes: estimator.bound(sizes) for sizes in space(self._job)}
        self.found.compared = len(bounds)
        # ``shortest`` is the estimated step time of the best parallel sizes, in seconds.
        for sizes in sorted(bounds, key=lambda one: (one != self._job.sizes, bounds[one])):
            far = _FAR * shortest
            if bounds[sizes] > far:
                break
            made = list(estimator.estimates(sizes, worse_than=far))
            estimated += made
            of_all = (one for one in made if self._kinds[0].has_estimated(one) and not one.excess)
            shortest = min([shortest, *(one.seconds for one in of_all)])
        self._too_full = [one for one in estimated if one.excess]
        self.found.is_complete = True
        shortlist = self._shortlist(estimated)
        progress.steps, has_answered = len(shortlist), False
        for candidate in shortlist:
            timed = self._timed(candidate)
            if timed is not None:
                self._simulated.append((candidate, *timed))
                best = min(self._simulated, key=lambda one: one[2])
                progress.found = f"the shortest so far is {self._in_words(best)}"
            progress.done += 1
            if progress.done >= FIRST and self._simulated and not has_answered:
                has_answered = True
                best = min(self._simulated, key=lambda one: one[2])
                remark(f"a first answer: {self._in_words(best)}, as estimated")
                answered()

    def _in_words(self, one: tuple[Estimated, Layout, float]) -> str:
        candidate, _, seconds = one
        return (
            f"{candidate.sizes.text(self._job.gpus)} under {candidate.spec}: {seconds:.4g} s a step"
        )

    def _shortlist(self, estimated: Iterable[Estimated]) -> list[Estimated]:
        """Return the estimated candidates to simulate: the best of each kind in turns.

        Schedules of the job's own sizes that may be the best there come first.
        """
        fitting = sorted((one for one in estimated if not one.excess), key=lambda one: one.seconds)
        queues = [[one for one in fitting if kind.has_estimated(one)] for kind in self._kinds]
        queues.append([one for one in fitting if one.sizes == self._job.sizes])
        taken: dict[int, Estimated] = {}
        numbers: dict[tuple[int, Sizes, bool], int] = {}
        for place in range(max(map(len, queues), default=0)):
            for number, queue in enumerate(queues):
                if place >= len(queue) or len(taken) >= SIMULATED:
                    continue
                one = queue[place]
                key = number, one.sizes, one.is_stock
                numbers[key] = numbers.get(key, 0) + 1
                if numbers[key] <= _OF_SIZES:
                    taken.setdefault(id(one), one)
        return list(taken.values())

    def _timed(self, candidate: Estimated) -> tuple[Layout, float] | None:
        """Return the best simple layout of ``candidate`` and its simulated seconds of a step.

        None if it has no layout, or does not fit.
        """
        if self._works(candidate.sizes) is None:
            return None
        figures = self._figures_of(candidate)
        work = figures.work
        placement = choose(candidate.spec).place(work.ranks)
        model, layouts = work.model, self._simple_layouts(candidate)
        with contextlib.suppress(ValueError):
            of_model = work.bytes_of(layouts[0].of(model), placement, VocabularyParallel.NONE)
            bound = self._job.memory_of(of_model)
            start = Timed(candidate.spec, layouts[0], figures, bound).best_of(layouts)
            if not start.fits:
                return None
            of_model = work.bytes_of(start.layout.of(model), placement, VocabularyParallel.NONE)
            return start.layout, start.seconds + max(map(work.seconds_outside_passes, of_model))
        return None

    def _simple_layouts(self, candidate: Estimated) -> list[Layout]:
        """Return layouts for ``candidate`` that take no search: as even as possible, and
        balanced."""
        figures = self._figures_of(candidate)
        work, layers = figures.work, len(self._job.model.layers)
        placement = choose(candidate.spec).place(work.ranks)
        layouts = [evenly(layers, placement.stages)]
        if placement.ranks > 1:
            balanced = least_slowest_stage(layers, placement, figures)
            even = with_even_ranks(balanced, placement, work.microbatches, figures)
            layouts += [even, balanced]
        return list(dict.fromkeys(layouts))

    def evaluate(self, number: int = 3) -> None:
        """Simulate the ``number`` best candidates of each kind exactly, as they would run."""
        for candidate, layout, _ in self._finalists(number):
            work = self._work_of(candidate.sizes, candidate.recompute)
            self._evaluate(candidate.sizes, work, candidate.spec, layout)

    def _finalists(self, number: int) -> list[tuple[Estimated, Layout, float]]:
        """Return the ``number`` simulated candidates with the shortest steps of each kind.

        Those with the job's own sizes count as a kind.
        """
        ordered = sorted(self._simulated, key=lambda one: one[2])
        kinds = [
            *([one for one in ordered if kind.has_estimated(one[0])] for kind in self._kinds),
            [one for one in ordered if one[0].sizes == self._job.sizes],
        ]
        return list({id(one[0]): one for kind in kinds for one in kind[:number]}.values())

    def offload(self) -> None:
        """Simulate candidates that fit into memory only with offload.

        They are the best of those that are estimated to be faster than the best candidate that fits
        without offload, at most one for each combination of sizes.
        """
        best = self.found.best(self._kinds[-1])
        most = inf if best is None else best.seconds
        wanted = {
            one.sizes: one
            for one in sorted(self._too_full, key=lambda one: one.offloaded, reverse=True)
            if one.sizes.pipeline > 1 and one.offloaded < most
        }
        for one in list(reversed(wanted.values()))[:_OFFLOADED]:
            if self._works(one.sizes) is not None:
                layout = self._simple_layouts(one)[-1]
                work = self._work_of(one.sizes, one.recompute)
                self._evaluate(one.sizes, work, one.spec, layout, may_offload=True)

    def slice(self) -> None:
        """Simulate schedules with slices of the sequence.

        Steps with the best parallel sizes are tried, and with those that would be best if they
        fitted.
        """
        best, layers = self.found.best(self._kinds[-1]), len(self._job.model.layers)
        choices: list[tuple[Sizes, LayerRecompute]] = []
        if best is not None:
            least = min(self._job.recompute, key=amount_of)
            choices += [(best.sizes, best.made.recompute), (best.sizes, least)]
        if self._too_full:
            shortest = min(self._too_full, key=lambda one: one.seconds)
            choices.append((shortest.sizes, shortest.recompute))
        most = inf if best is None else best.seconds / (1 + WORTH_SLICES)
        for sizes, recompute in dict.fromkeys(choices):
            if self._works(sizes) is None or sizes.pipeline == 1:
                continue
            work = self._work_of(sizes, recompute)
            for count, spec in product(COUNTS, _SLICED):
                stages = choose(spec).place(work.ranks).stages
                if stages > layers:
                    continue
                sliced = replace(work, slices=Slices(count, Lengths.BALANCED))
                layout = evenly(layers, stages)
                cuts = [sliced]
                with contextlib.suppress(ValueError):  # other options may conflict with slices
                    if may_gain_by_joining(sliced.variant(spec, layout)):
                        joined = replace(sliced.slices, joined_weights=True)
                        cuts.append(replace(sliced, slices=joined))
                    for cut in cuts:
                        if _may_take_less(cut, spec, layout, most):
                            self._evaluate(sizes, cut, spec, layout, shorter_than=most)

    def search_schedules(self) -> None:
        """Search schedules for the best step, and for the best step whose estimate is checked.

        The searched schedules have the same placement and layout as that step.
        """
        kinds = [kind for kind in self._kinds if not kind.only_stock]
        found = [self.found.best(kind) for kind in reversed(kinds)]
        piped = (step for step in found if step is not None and step.sizes.pipeline > 1)
        for best in dict.fromkeys(piped):
            made = best.made
            problem = made.candidate.variant.problem
            work = self._work_of(best.sizes, made.recompute)
            if problem.options != work.variant(made.schedule, made.layout).problem.options:
                continue  # searches support neither slices of sequences nor offload
            placement = problem.placement
            for search in SEARCHES:
                if (search.placement, search.chunks) == (placement.name, placement.chunks):
                    self._evaluate(
                        best.sizes, work, search.spec, made.layout, search=True, better_than=best
                    )

    def _evaluate(
        self,
        sizes: Sizes,
        work: Work,
        spec: str,
        layout: Layout,
        *,
        search: bool = False,
        may_offload: bool = False,
        better_than: SizedStep | None = None,
        shorter_than: float = inf,
    ) -> None:
        """Simulate a step and add it to the results, if it takes less than ``shorter_than``
        seconds.

        Nothing is added if it cannot be made, or a launch refuses it.
        """
        sized = self._works(sizes)
        assert sized is not None
        with contextlib.suppress(ValueError):
            sized.permits(spec, VocabMethod.NAIVE)
            made = evaluate(
                work,
                spec,
                layout,
                allowed_bytes=self._bound(work),
                search=search,
                may_offload=may_offload,
                better_than=inf if better_than is None else better_than.seconds,
            )
            if made.seconds < shorter_than:
                self.found.steps.append(SizedStep(sizes, made))

    def lay_out(self) -> None:
        """Compare all layouts and schedules of the best parallel sizes of each kind.

        The job's own sizes come first.
        """
        done: set[Sizes] = set()
        for kind in (None, *reversed(self._kinds)):
            best = None if kind is None else self.found.best(kind)
            sizes = self._job.sizes if best is None else best.sizes
            if sizes not in done:
                done.add(sizes)
                with task(sizes.text(self._job.gpus)):
                    self.found.steps += self._laid_out(sizes)

    def _laid_out(self, sizes: Sizes) -> list[SizedStep]:
        """Return the best steps with these parallel ``sizes`` and any layout.

        The comparison starts with Megatron's best schedule if one fits, so that it gets its best
        layout too.
        """
        of_sizes = [one for one in self._simulated if one[0].sizes == sizes]
        of_sizes.sort(key=lambda one: (not one[0].is_stock, one[2]))
        if not of_sizes or sizes.pipeline == 1:
            return []
        candidate, layout, _ = of_sizes[0]
        sized = self._works(sizes)
        assert sized is not None
        works = sorted(sized.works, key=lambda work: work.recompute != candidate.recompute)
        bound = self._bound(works[0])
        try:
            compared = compare_layouts(
                works,
                (candidate.spec, layout),
                sized.rule,
                bound,
                permits=sized.permits,
                search=False,
            )
        except ValueError:
            return []
        return [
            SizedStep(sizes, made)
            for made in dict.fromkeys([compared.baseline, *compared.others.values()])
            if bound is None or made.fullest <= bound
        ]

    def _bound(self, work: Work) -> float | None:
        placement = choose("1f1b").place(work.ranks)
        stages = evenly(len(work.model.layers), work.ranks).of(work.model)
        return self._job.memory_of(work.bytes_of(stages, placement, VocabularyParallel.NONE))

    def _works(self, sizes: Sizes) -> SizedWorks | None:
        """Return the training with these parallel ``sizes``; None if a launch would refuse them."""
        if sizes not in self._sized:
            try:
                self._sized[sizes] = self._works_of(sizes)
            except ValueError as error:
                # The reason of a refusal is noted before the refused sizes, as the planning time
                # may end between the two statements.
                self.found.refused[sizes] = str(error)
                self._sized[sizes] = None
        return self._sized[sizes]

    def _figures_of(self, candidate: Estimated) -> StageFigures:
        key = candidate.sizes, candidate.recompute
        if key not in self._figures:
            self._figures[key] = StageFigures(self._work_of(candidate.sizes, candidate.recompute))
        return self._figures[key]

    def _work_of(self, sizes: Sizes, recompute: LayerRecompute) -> Work:
        sized = self._works(sizes)
        assert sized is not None
        return next(work for work in sized.works if work.recompute == recompute)


def _may_take_less(work: Work, spec: str, layout: Layout, seconds: float) -> bool:
    """Return whether a step could take fewer than ``seconds``, by the work of its busiest rank."""
    variant = work.variant(spec, layout)
    assert variant.model is not None
    outside = max(map(work.seconds_outside_passes, variant.model))
    return least_step(variant) + outside < seconds
