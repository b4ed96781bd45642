"""The variants that are tried for a model, the candidates made of them, and a plan of several.

A plan compares schedules, and for each some ways to treat vocabulary, memory and recompute. A
variant is one such combination before it is tried, a candidate is one that runs and fits, and the
plan ranks them: by time, then by memory, then by the number of settings.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.base.words import counted
from megatron_ext.compile.build import build_program
from megatron_ext.compile.output_layer import place_output_layer
from megatron_ext.compile.overlap import is_gain
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import Maturity, ResolvedSpec, entries, entry_of
from megatron_ext.compile.report import ScheduleReport
from megatron_ext.cost_model.model_memory import ModelBytes
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import is_line_or_v
from megatron_ext.schedule.problem import (
    Problem,
    Recompute,
    VocabularyParallel,
)
from megatron_ext.schedule.slices import Slices

# Largest difference of two estimates that counts as a tie, as a share of a step or of a rank's
# bytes.
ALIKE = 0.01


class VocabMethod(enum.StrEnum):
    """Treatment of the embedding and the output layer: whole on the first and the last stage, the
    same with fewer layers on these stages, or split over all ranks."""

    # Embedding and output layer are whole, on the first and the last stage, as in Megatron's
    # default.
    NAIVE = "naive"
    # The stages with the embedding and the output layer have fewer layers.
    REDISTRIBUTED = "redistributed"
    ONE = VocabularyParallel.ONE.value  # embedding and output layer are split over all ranks
    TWO = VocabularyParallel.TWO.value

    @property
    def vocabulary(self) -> VocabularyParallel:
        is_divided = self in (VocabMethod.ONE, VocabMethod.TWO)
        return VocabularyParallel(self.value) if is_divided else VocabularyParallel.NONE

    @classmethod
    def of(cls, vocabulary: VocabularyParallel) -> VocabMethod:
        """Return the treatment of embedding and output layer for a setting of vocabulary
        parallelism."""
        return cls.NAIVE if vocabulary is VocabularyParallel.NONE else cls(vocabulary.value)


@dataclass(frozen=True)
class Variant:
    """Schedule and the problem that it solves, to be tried by a plan.

    Attributes:
        resolved: the schedule, as chosen by name and options.
        problem: the training step that the schedule is made for.
        model: bytes of parameters, gradients and optimizer states on each rank; None: not known.
        may_recompute: whether activations may be recomputed to fit into a memory limit.
        layers: number of layers of the model; None: not known.
        in_seconds: whether times are seconds, not some other unit of the costs.
    """

    resolved: ResolvedSpec
    problem: Problem
    model: Sequence[ModelBytes] | None = None
    may_recompute: bool = False
    layers: int | None = None
    in_seconds: bool = True

    @property
    def build(self) -> Callable[[ResolvedSpec, Problem], Program]:
        """Function that makes the program of this schedule from its problem."""
        return build_program if self.problem.costs.held_bytes is None else place_output_layer

    def check_launch(self) -> None:
        """Raise ValueError if no training can run this schedule, though it can be simulated."""
        is_divided = self.problem.options.vocab_parallel is not VocabularyParallel.NONE
        if is_divided and not is_line_or_v(self.problem.placement):
            raise ValueError(
                "vocabulary parallelism requires one stage on each rank in order, or a V of stages"
            )


def goes_with(slices: Slices, resolved: ResolvedSpec, vocabulary: VocabularyParallel) -> bool:
    """Return whether a schedule can cut microbatches into ``slices`` with this vocabulary
    setting."""
    is_undivided = vocabulary is VocabularyParallel.NONE
    return slices.count == 1 or (resolved.traits.takes_slices and is_undivided)


def keeps_pairs(resolved: ResolvedSpec, vocabulary: VocabularyParallel) -> bool:
    """Return whether a schedule can overlap most forward passes with backward passes.

    ``vocabulary`` is its setting of vocabulary parallelism, which excludes overlap.
    """
    return entry_of(resolved.spec).traits.keeps_pairs and vocabulary is VocabularyParallel.NONE


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank: of its part of the model, and of activations at their peak.

    The model's part includes temporary tensors and CUDA's context.
    """

    model: ModelBytes
    activations: float

    @property
    def total(self) -> float:
        return self.model.total + self.activations


@dataclass(frozen=True, eq=False)
class Candidate:
    """Schedule of a plan that can run, with its simulated time and memory.

    Attributes:
        method: how embedding and output layer are treated.
        report: the simulated times and memory of its program.
        variant: the schedule and problem that it was made of.
        limit: the memory limit that it was made for.
        memory: bytes of each rank; None if not known.
        has_all_microbatches: whether all microbatches were built; if not, times and memory are
            derived from the repeating part of a shorter step.
    """

    method: VocabMethod
    report: ScheduleReport
    variant: Variant
    limit: MemoryLimit | None = None
    memory: tuple[RankMemory, ...] | None = None
    has_all_microbatches: bool = True

    def program(self) -> Program:
        """Build the candidate's program once more and return it.

        A plan stores no programs, since they are large; results of searches are cached.
        """
        return self.variant.build(self.variant.resolved, self.variant.problem)

    @property
    def schedule(self) -> str:
        return self.report.schedule

    @property
    def family(self) -> str:
        """Name of the candidate's schedule family, which is the schedule's name without options."""
        return self.schedule.partition(":")[0]

    @property
    def maturity(self) -> Maturity:
        return entries()[self.family].maturity

    @property
    def step(self) -> float:
        """Time of a step under this candidate: the makespan, or about the span if steps overlap."""
        return self.report.step

    @property
    def overlaps(self) -> bool:
        """Whether this candidate uses post-validation (steps that overlap), and gains by it."""
        return self.report.options.steps_overlap and is_gain(self.report.makespan, self.step)

    @property
    def fullest(self) -> float | None:
        """Bytes of the rank that holds most under this candidate; None if they are not known."""
        return None if self.memory is None else max(rank.total for rank in self.memory)

    @property
    def recompute(self) -> Recompute:
        """Setting of recomputation in bubbles that the candidate's schedule uses."""
        return self.variant.problem.options.recompute

    @property
    def holds(self) -> float:
        """Memory of the fullest rank: bytes (`fullest`) if known, else its peak in microbatches."""
        return self.report.peak if self.fullest is None else self.fullest


@dataclass(frozen=True)
class Plan:
    """Comparison of schedules for one training job.

    Attributes:
        candidates: the schedules that can run, shortest step first.
        refusals: reasons why other schedules are no candidates, by schedule and vocabulary method.
    """

    candidates: tuple[Candidate, ...]
    refusals: Mapping[tuple[str, VocabMethod], str]

    @property
    def recommendable(self) -> tuple[Candidate, ...]:
        """The candidates whose schedule is stable (well tested); all candidates if none is."""
        return stable_of(self.candidates) or self.candidates

    @property
    def best(self) -> Candidate | None:
        """The `recommendable` candidate with the shortest step; of equals, that with least
        memory."""
        return next(iter(self.recommendable), None)

    @property
    def tied(self) -> tuple[Candidate, ...]:
        """The `recommendable` candidates whose steps are about as short as the shortest.

        The recommended one comes first.
        """
        return tied(self.recommendable)

    @property
    def best_of_each(self) -> tuple[Candidate, ...]:
        """Each schedule once, with its best treatment of the vocabulary, shortest step first."""
        best: dict[str, Candidate] = {}
        for candidate in self.candidates:
            best.setdefault(candidate.schedule, candidate)
        return tuple(best.values())

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The `recommendable` candidates that no other beats in both time and memory.

        The shortest step comes first.
        """
        return pareto_front(self.recommendable, lambda candidate: candidate.holds)

    @property
    def methods(self) -> tuple[VocabMethod, ...]:
        """All treatments of embedding and output layer that the plan has tried."""
        there_are = {candidate.method for candidate in self.candidates} | {
            method for _, method in self.refusals
        }
        return tuple(method for method in VocabMethod if method in there_are)


def stable_of(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    return tuple(candidate for candidate in candidates if candidate.maturity is Maturity.STABLE)


def pareto_front(
    shortest_first: Iterable[Candidate], memory: Callable[[Candidate], float]
) -> tuple[Candidate, ...]:
    front: list[Candidate] = []
    for candidate in shortest_first:
        if not front or memory(candidate) < memory(front[-1]):
            front.append(candidate)
    return tuple(front)


def tied_for_best[T](
    options: Iterable[T],
    seconds: Callable[[T], float],
    holds: Callable[[T], float],
    settings: Callable[[T], int],
) -> tuple[T, ...]:
    """Return the best of ``options``, followed by those that tie with it, shortest step first.

    Steps within `ALIKE` of the shortest are a tie. Of a tie, those within `ALIKE` of the least
    memory are equally lean. The best is the equally lean one with the fewest settings, and of
    several the one with the shortest step.

    Args:
        seconds: function that returns the seconds of a step under an option.
        holds: function that returns the memory of the fullest rank.
        settings: function that returns the number of settings in addition to the schedule.
    """
    ordered = sorted(options, key=seconds)
    alike = [one for one in ordered if seconds(one) <= (1 + ALIKE) * seconds(ordered[0])]
    if not alike:
        return ()
    least = min(map(holds, alike))
    lean = [one for one in alike if holds(one) <= (1 + ALIKE) * least]
    best = min(lean, key=settings)  # the first of several candidates has the shortest step
    return best, *(one for one in alike if one is not best)


def tied(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Return the ``candidates`` that tie for the shortest step, the recommended one first."""
    return tied_for_best(
        candidates, lambda one: one.step, lambda one: one.holds, lambda one: len(setting_names(one))
    )


def setting_names(candidate: Candidate) -> tuple[str, ...]:
    """Return a candidate's settings in addition to its schedule, in words such as ``2 slices``."""
    made = candidate.report
    words = []
    if candidate.method is VocabMethod.REDISTRIBUTED:
        words.append("layers moved")
    elif candidate.method is not VocabMethod.NAIVE:
        words.append("vocabulary divided")
    if made.slices > 1:
        words.append(counted(made.slices, "slice"))
    if made.options.slices.joined_weights:
        words.append("W of slices joined")
    if made.pairs:
        words.append("passes in pairs")
    if made.offloads:
        words.append("activations on the host")
    if made.recomputed:
        words.append(f"{made.recomputed:.0%} recomputed")
    return tuple(words)


def by_time(candidate: Candidate) -> tuple[float, float]:
    return candidate.step, candidate.report.peak
