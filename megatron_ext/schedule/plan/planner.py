"""All families side by side on one model, and which to take."""

from __future__ import annotations

import contextlib
import enum
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace

from megatron_ext.schedule.build.auto_spec import SEARCHES
from megatron_ext.schedule.build.build import build_program, keeping_proofs
from megatron_ext.schedule.build.output_layer import place_output_layer
from megatron_ext.schedule.build.overlap import is_gain
from megatron_ext.schedule.build.registry import Choice, Mark, entries, entry_of
from megatron_ext.schedule.build.report import ScheduleReport, report
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.model.model_memory import ModelBytes
from megatron_ext.schedule.placement import is_line_or_v
from megatron_ext.schedule.problem import (
    Extras,
    Offload,
    Problem,
    Recompute,
    VocabularyParallel,
)
from megatron_ext.schedule.program.memory import in_bytes, peaks
from megatron_ext.schedule.program.verify import Program
from megatron_ext.schedule.progress import Task, task
from megatron_ext.schedule.search.bounds import lower_bound
from megatron_ext.schedule.slices import Slices
from megatron_ext.schedule.transforms.vocabulary_costs import share_vocabulary


class VocabMethod(enum.StrEnum):
    """What is done about embedding and output layer."""

    NAIVE = "naive"  # nothing: they are on the first and the last stage
    REDISTRIBUTED = "redistributed"  # the stages with them have fewer layers
    ONE = VocabularyParallel.ONE.value  # both are divided over all ranks
    TWO = VocabularyParallel.TWO.value

    @property
    def vocabulary(self) -> VocabularyParallel:
        is_divided = self in (VocabMethod.ONE, VocabMethod.TWO)
        return VocabularyParallel(self.value) if is_divided else VocabularyParallel.NONE


@dataclass(frozen=True)
class Variant:
    """A schedule with a problem, to be tried.

    Attributes:
        model: what parameters, gradients and optimizer states take on each rank; None if not known.
        may_recompute: whether activations may be given up and made again, to fit into a limit.
    """

    choice: Choice
    problem: Problem
    model: Sequence[ModelBytes] | None = None
    may_recompute: bool = False

    @property
    def build(self) -> Callable[[Choice, Problem], Program]:
        """What makes its program."""
        return build_program if self.problem.costs.held_bytes is None else place_output_layer

    def check_launch(self) -> None:
        """Raise ValueError if it could be simulated, and no launch could run it."""
        is_divided = self.problem.extras.vocabulary is not VocabularyParallel.NONE
        if is_divided and not is_line_or_v(self.problem.placement):
            raise ValueError("its vocabulary cannot be divided: only that of a line or a V can")


def goes_with(slices: Slices, choice: Choice, vocabulary: VocabularyParallel) -> bool:
    """Whether a schedule may be had with ``slices``, and ``vocabulary`` so divided."""
    is_whole = vocabulary is VocabularyParallel.NONE
    return slices.count == 1 or (choice.takes_slices and is_whole)


def keeps_pairs(choice: Choice, vocabulary: VocabularyParallel) -> bool:
    """Whether a schedule, with ``vocabulary`` so divided, runs most F beside backward passes where
    that is asked for."""
    return entry_of(choice.spec).keeps_pairs and vocabulary is VocabularyParallel.NONE


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank holds: of the model, and of activations at their peak."""

    model: ModelBytes
    activations: float

    @property
    def total(self) -> float:
        return self.model.total + self.activations


@dataclass(frozen=True, eq=False)
class Candidate:
    """A schedule that can run.

    Attributes:
        report: what `report` says of it.
        variant: what it was made of.
        limit: the memory limit that it was made for.
        memory: of each rank; None if not known.
    """

    method: VocabMethod
    report: ScheduleReport
    variant: Variant
    limit: MemoryLimit | None = None
    memory: tuple[RankMemory, ...] | None = None

    def program(self) -> Program:
        """It once more: a plan keeps none, they are large. What was searched for is known."""
        return self.variant.build(self.variant.choice, self.variant.problem)

    @property
    def schedule(self) -> str:
        return self.report.schedule

    @property
    def family(self) -> str:
        """Its name, without options."""
        return self.schedule.partition(":")[0]

    @property
    def mark(self) -> Mark:
        return entries()[self.family].mark

    @property
    def step(self) -> float:
        """What a step costs: the makespan, or where steps overlap about the span."""
        return self.report.step

    @property
    def overlaps(self) -> bool:
        """Whether it takes post-validation, and gains by it."""
        return self.report.post_validation and is_gain(self.report.makespan, self.step)

    @property
    def fullest(self) -> float | None:
        """Bytes of the rank that holds most."""
        return None if self.memory is None else max(rank.total for rank in self.memory)

    @property
    def recompute(self) -> Recompute:
        """What is given up and made again."""
        return self.variant.problem.extras.recompute

    @property
    def holds(self) -> float:
        """`fullest` if it is known, else its peak in microbatches."""
        return self.report.peak if self.fullest is None else self.fullest


@dataclass(frozen=True)
class Plan:
    """What can be taken, and what cannot.

    Attributes:
        candidates: shortest step first.
        refusals: why others are not among them.
    """

    candidates: tuple[Candidate, ...]
    refusals: Mapping[tuple[str, VocabMethod], str]

    @property
    def recommendable(self) -> tuple[Candidate, ...]:
        """The stable ones; where there is none, all."""
        return stable_of(self.candidates) or self.candidates

    @property
    def best(self) -> Candidate | None:
        """The shortest step within the limit of what is `recommendable`; of equals, the one that
        holds least."""
        return next(iter(self.recommendable), None)

    @property
    def best_of_each(self) -> tuple[Candidate, ...]:
        """Each schedule with what is best done about the vocabulary, shortest first."""
        best: dict[str, Candidate] = {}
        for candidate in self.candidates:
            best.setdefault(candidate.schedule, candidate)
        return tuple(best.values())

    @property
    def front(self) -> tuple[Candidate, ...]:
        """Those `recommendable` that no other beats in both time and memory, shortest first."""
        return pareto_front(self.recommendable, lambda candidate: candidate.holds)

    @property
    def methods(self) -> tuple[VocabMethod, ...]:
        """All that was tried for the vocabulary."""
        there_are = {candidate.method for candidate in self.candidates} | {
            method for _, method in self.refusals
        }
        return tuple(method for method in VocabMethod if method in there_are)


def stable_of(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    return tuple(candidate for candidate in candidates if candidate.mark is Mark.STABLE)


def pareto_front(
    shortest_first: Iterable[Candidate], memory: Callable[[Candidate], float]
) -> tuple[Candidate, ...]:
    front: list[Candidate] = []
    for candidate in shortest_first:
        if not front or memory(candidate) < memory(front[-1]):
            front.append(candidate)
    return tuple(front)


# A spec's problem with one method, None if it cannot be told; raises ValueError if it has none.
VariantOf = Callable[[str, VocabMethod], Variant | None]
# About what a step of a variant takes at least, in so many bytes of a rank; 0: not known. Raises
# TooFull if it does not fit.
AboutOf = Callable[[Variant, VocabMethod, float | None], float]
Pair = tuple[str, VocabMethod]  # a spec, and what is done about the vocabulary

SEARCHED = 2  # with each method, of all that search
CLOSE = 0.02  # above what any schedule takes: of a long step, a search gains no more to speak of
_WHATEVER = ", whatever its order"  # so ends a refusal of what a bound proves to take longer
_BY_SHORTER = ", as a shorter step tells"


def make_plan(
    variant_of: VariantOf,
    room: float | None = None,
    only_promising: bool = False,
    may_offload: bool = False,
    better_than: Candidate | None = None,
    specs: Sequence[str] | None = None,
    known: Sequence[Candidate] = (),
    about_of: AboutOf | None = None,
) -> Plan:
    """Build and simulate every family with every method, what searches last.

    Of those that search, the `SEARCHED` that are best without it are searched for, with each
    method.

    Args:
        room: bytes that a rank has for everything; None: as much as it takes.
        only_promising: leave out, with its reason, what is proved to take longer than a stable
            one, and search with one method only, that of the best before.
        may_offload: let activations of a schedule leave for the host where it does not fit without.
        better_than: what is known already, for ``only_promising`` to compare with.
        specs: what is compared; None: every family, and those that search with each number of
            chunks (`SEARCHES`).
        known: what has been made already of ``variant_of`` in ``room``, which is not made again.
        about_of: tells about what a step takes, where steps are so long that not all can be made:
            what takes longer than another by that is left out, too, and what is `CLOSE` to what it
            has to take is not searched for.
    """
    comparison = _Comparison(
        variant_of, room, only_promising, may_offload, better_than, known, about_of
    )
    pairs = [(spec, method) for spec in specs or all_specs() for method in VocabMethod]
    searched = [pair for pair in pairs if entry_of(pair[0]).searches]
    at_once = [pair for pair in pairs if pair not in searched]
    with task("comparing schedules", len(pairs)) as work:
        if about_of is not None:
            at_once.sort(key=comparison.about)
        for pair in at_once:
            comparison.add(pair)
            work.done += 1
            work.found = comparison.found
        for method in VocabMethod:
            comparison.add_searched([pair for pair in searched if pair[1] is method], work)
    return Plan(tuple(sorted(comparison.candidates, key=_by_time)), comparison.refusals)


def all_specs() -> Iterator[str]:
    """Every family, and those that search with each number of chunks."""
    with_chunks = defaultdict(list)
    for search in SEARCHES:
        with_chunks[entry_of(search.spec).name].append(search.spec)
    for name in entries():
        yield from with_chunks.get(name, [name])


class _Comparison:
    """A plan while it is made. Arguments as of `make_plan`."""

    def __init__(
        self,
        variant_of: VariantOf,
        room: float | None,
        only_promising: bool,
        may_offload: bool,
        better_than: Candidate | None,
        known: Sequence[Candidate],
        about_of: AboutOf | None,
    ) -> None:
        self.candidates: list[Candidate] = []
        self.refusals: dict[Pair, str] = {}
        self._variant_of, self._better_than = variant_of, better_than
        self._known = {(made.schedule, made.method): made for made in known}
        self._about_of, self._is_long = about_of, about_of is not None
        self._abouts: dict[Pair, float] = {}
        self._room, self._may_offload = room, may_offload
        self._only_promising = only_promising

    def add(self, pair: Pair) -> bool:
        """Make ``pair`` a candidate, or keep why it is none. Whether it is one."""
        candidate = self._consider(pair)
        if candidate is None:
            return False
        self.candidates.append(candidate)
        return True

    @property
    def found(self) -> str:
        """The best of all so far, in words."""
        best = min(stable_of(self.candidates), key=_by_time, default=None)
        return "" if best is None else f"so far the best is {best.schedule}: {best.step:.4g} a step"

    def add_searched(self, pairs: Sequence[Pair], work: Task) -> None:
        """Make the best `SEARCHED` of ``pairs`` candidates, by what each has without its search."""
        short = [self._consider(pair, without_search=True) for pair in pairs]
        ahead: list[str] = []
        for candidate in sorted(filter(None, short), key=_by_time):
            pair = candidate.schedule, candidate.method
            if len(ahead) == SEARCHED:
                self.refusals[pair] = f"{' and '.join(ahead)} take less time before any search"
            elif self._is_long and self._is_known_enough(candidate):
                self.candidates.append(candidate)
                ahead.append(candidate.schedule)
            elif self.add(pair):
                ahead.append(candidate.schedule)
                work.found = self.found
        work.done += len(pairs)

    def _is_known_enough(self, candidate: Candidate) -> bool:
        """Whether a search would gain next to nothing, or begin with what is no better than others
        that need none."""
        best = self._best
        return is_close(candidate) or (best is not None and candidate.step >= best.step)

    def _consider(self, pair: Pair, without_search: bool = False) -> Candidate | None:
        spec, method = pair
        try:
            variant = self._variant_of(spec, method)
            if variant is None:
                return None
            variant.check_launch()
            if (variant.choice.spec, method) in self._known:
                return self._known[variant.choice.spec, method]
            best = self._best
            if best is not None:
                _check_promising(variant, method, self._room, best)
            if best is not None and self._is_long and variant.choice.searches:
                _check_on_stages_of(best, variant)
            elif self._is_long:
                self._check_about(pair, best)
            if without_search:
                variant = replace(variant, choice=variant.choice.without_search)
            at_most = best.step if best is not None and self._is_long else math.inf
            return consider(variant, method, self._room, self._may_offload, at_most)
        except ValueError as error:
            self.refusals[pair] = str(error)
            return None

    @property
    def _best(self) -> Candidate | None:
        """The best stable one that others are compared with, if they are."""
        there = [*self.candidates, *self._known.values()]
        better = [] if self._better_than is None else [self._better_than]
        known = (*stable_of(there), *better) if self._only_promising else ()
        return min(known, key=_by_time, default=None)

    def about(self, pair: Pair) -> float:
        """About what ``pair`` takes at least; 0 if that is not known."""
        if pair not in self._abouts:
            try:
                self._abouts[pair] = self._told(pair)
            except TooFull as error:
                self._abouts[pair], self.refusals[pair] = math.inf, str(error)
            except ValueError:
                self._abouts[pair] = 0.0
        return self._abouts[pair]

    def _check_about(self, pair: Pair, best: Candidate | None) -> None:
        """Raise ValueError if ``pair`` does not fit, or takes more time than ``best``."""
        about = self.about(pair)
        if math.isinf(about):
            raise ValueError(self.refusals[pair])
        if best is not None and about > best.step:
            more = f"{about / best.step - 1:.1%} more time than {best.schedule}"
            raise ValueError(f"takes about {more}{_BY_SHORTER}")

    def _told(self, pair: Pair) -> float:
        """Raises ValueError if there is no such schedule."""
        assert self._about_of is not None
        spec, method = pair
        variant, best = self._variant_of(spec, method), self._best
        if variant is None or (variant.choice.spec, method) in self._known:
            return 0.0
        variant.check_launch()
        if best is not None:
            _check_promising(variant, method, self._room, best)
        return self._about_of(variant, method, self._room)


def consider(
    variant: Variant,
    method: VocabMethod,
    room: float | None = None,
    may_offload: bool = False,
    at_most: float = math.inf,
) -> Candidate:
    """Build and simulate ``variant``, within its memory limit and ``room`` bytes: if it may and
    must, with offload or recompute, whichever takes less time. What chooses itself what is made
    again is tried with recompute also where it need not, if memory is what costs it time. Where
    pairs are asked for, it is tried with them and without.

    Where there is no limit, the schedule is made for what the model leaves of ``room``: a family
    may make use of it.

    Args:
        at_most: what does not fit, and would take more seconds if it did, is not made to fit.

    Raises:
        ValueError: the schedule cannot be made so.
    """
    with keeping_proofs():
        if not variant.problem.extras.pairs:
            return _consider(variant, method, room, may_offload, at_most)
        alone = replace(variant, problem=variant.problem.with_extras(pairs=False))
        made: list[Candidate] = []
        with contextlib.suppress(ValueError):
            made.append(_without_offload(variant, method, room))
        try:
            made.insert(0, _consider(alone, method, room, may_offload, at_most))
        except ValueError:  # in pairs the order is another, and may hold less
            if not made:
                raise
        return min(made, key=_by_time)


def _consider(
    variant: Variant, method: VocabMethod, room: float | None, may_offload: bool, at_most: float
) -> Candidate:
    limit = variant.problem.memory_limit or limit_left(variant, room)
    made: list[Candidate] = []
    refusal: ValueError | None = None
    try:
        made.append(_without_offload(variant, method, room))
    except TooFull as error:
        if error.step > at_most:
            raise
        refusal = error
    except ValueError as error:
        refusal = error
    if limit is not None and (refusal or _is_slowed_by_memory(variant, made[0])):
        for extras in _ways_to_fit(variant, may_offload and refusal is not None):
            with contextlib.suppress(ValueError):
                fitting = replace(variant.problem, memory_limit=limit, extras=extras)
                candidate = _candidate(replace(variant, problem=fitting), method)
                _check_room(candidate, room)
                made.append(candidate)
    if not made:
        assert refusal is not None
        raise refusal
    return min(made, key=_by_time)


SLOWED = 1.1  # times what any schedule would take without a limit


def _is_slowed_by_memory(variant: Variant, made: Candidate) -> bool:
    """Whether ``made`` may well be shorter where more is made again."""
    if not (variant.may_recompute and variant.choice.fits_recompute):
        return False
    unlimited = replace(variant.problem, memory_limit=None)
    return made.step > SLOWED * _least_time(unlimited, variant.choice.splits_backward)


def _ways_to_fit(variant: Variant, may_offload: bool) -> Iterator[Extras]:
    """What may be asked for beside a memory limit, to fit into it."""
    problem = variant.problem
    if may_offload and problem.costs.host is not None:
        yield replace(problem.extras, offload=Offload.FIT)
    if variant.may_recompute:
        yield replace(problem.extras, recompute=Recompute(fit=True))


def limit_left(variant: Variant, room: float | None) -> MemoryLimit | None:
    """What the model leaves of ``room`` on the rank where it takes most; None: not known, or
    nothing."""
    if room is None or variant.model is None:
        return None
    left = room - max(rank.total for rank in variant.model)
    return MemoryLimit(bytes=int(left)).as_written() if left > 0 else None


def _without_offload(variant: Variant, method: VocabMethod, room: float | None) -> Candidate:
    left = limit_left(variant, room)
    if left is not None and variant.problem.memory_limit is None:
        # One limit is for all ranks, and the fullest may be one that holds little.
        with contextlib.suppress(ValueError):
            return _candidate(
                replace(variant, problem=replace(variant.problem, memory_limit=left)), method
            )
    made = _candidate(variant, method)
    _check_room(made, room)
    return made


class TooFull(ValueError):
    """Why a schedule does not fit that would take ``step`` if it did."""

    def __init__(self, message: str, step: float) -> None:
        super().__init__(message)
        self.step = step


def _check_room(made: Candidate, room: float | None) -> None:
    """Raise TooFull if a rank would hold more than ``room``."""
    if room is None or made.memory is None:
        return
    totals = [rank.total for rank in made.memory]
    fullest = max(totals)
    if fullest > room:
        raise TooFull(
            f"rank {totals.index(fullest)} would hold {fullest / 2**30:.3g} GiB, "
            f"{(fullest - room) / 2**30:.3g} GiB more than it may",
            made.step,
        )


def _by_time(candidate: Candidate) -> tuple[float, float]:
    return candidate.step, candidate.report.peak


def _check_promising(
    variant: Variant, method: VocabMethod, room: float | None, best: Candidate
) -> None:
    """Raise ValueError if no schedule of this kind takes less time than ``best``, or for a search
    that would have to be made with every method."""
    problem = variant.problem
    if variant.choice.searches and method is not best.method:
        raise ValueError(f"searched for only with the vocabulary as {best.schedule} has it")
    if problem.extras.pairs:  # how much they gain is not bounded
        return
    if variant.may_recompute:  # which makes a step longer, and any limit looser
        problem = replace(problem, memory_limit=None)
    elif room is not None and variant.model is not None and problem.memory_limit is None:
        left = max(room - min(rank.total for rank in variant.model), 0.0)
        problem = replace(problem, memory_limit=MemoryLimit(bytes=int(left)))
    bound = _least_time(problem, variant.choice.splits_backward)
    if bound > best.step:
        raise ValueError(
            f"takes at least {bound / best.step - 1:.1%} more time than {best.schedule}{_WHATEVER}"
        )


def _check_on_stages_of(best: Candidate, variant: Variant) -> None:
    """Raise ValueError if ``variant`` has other stages than ``best``."""
    if variant.problem.placement != best.variant.problem.placement:
        raise ValueError(f"searched for only on stages as {best.schedule} has them")


def without_figures(why: str) -> str:
    """``why`` a schedule is refused, the same for all that take longer than another."""
    endings = (end for end in (_WHATEVER, _BY_SHORTER) if why.endswith(end))
    return next((f"takes more time than another{end}" for end in endings), why)


def least_step(variant: Variant, room: float | None = None) -> float:
    """What no schedule like ``variant`` takes less than, with nothing made again to fit, within its
    limit or what the model leaves of ``room``."""
    limit = variant.problem.memory_limit or limit_left(variant, room)
    problem = replace(variant.problem, memory_limit=limit)
    return _least_time(problem, variant.choice.splits_backward)


def is_close(made: Candidate) -> bool:
    """Whether no search finds what takes `CLOSE` less than ``made``, in as much memory."""
    return made.step <= (1 + CLOSE) * least_step(made.variant)


def _least_time(problem: Problem, splits_backward: bool) -> float:
    if problem.extras.recompute != Recompute():  # which knows how to do with less memory
        extras = replace(problem.extras, recompute=Recompute())
        problem = replace(problem, memory_limit=None, extras=extras)
    costs = problem.costs
    if problem.extras.vocabulary is VocabularyParallel.NONE:
        return lower_bound(problem, splits_backward)
    shared = share_vocabulary(costs, problem.placement, problem.extras.vocabulary)
    work = [
        problem.microbatches * sum(figures[s] for figures in shared.seconds.values() for s in row)
        for row in problem.placement.stages_of
    ]
    layers = replace(problem, costs=costs.without_vocabulary()).with_extras(
        vocabulary=VocabularyParallel.NONE
    )
    return max(lower_bound(layers, splits_backward), *work)


_KEPT: ContextVar[dict[str, Candidate] | None] = ContextVar("kept", default=None)


@contextlib.contextmanager
def keeping_candidates() -> Iterator[None]:
    """What is built and simulated in the block is not again for the same problem."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def _candidate(variant: Variant, method: VocabMethod) -> Candidate:
    kept = _KEPT.get()
    if kept is None:
        return _made(variant, method)
    choice = variant.choice
    key = repr((choice.spec, choice.takes_long, variant.problem, variant.model, method))
    if key not in kept:
        kept[key] = _made(variant, method)
    return replace(kept[key], variant=variant)


def _made(variant: Variant, method: VocabMethod) -> Candidate:
    program, made = report(variant.choice, variant.problem, variant.build)
    memory = None
    if variant.model is not None and program.problem.costs.held_bytes is not None:
        held = peaks(program.schedule, in_bytes(program.problem.costs))
        memory = tuple(map(RankMemory, variant.model, held))
    return Candidate(method, made, variant, variant.problem.memory_limit, memory)
