"""What is tried for a model, what is known of a schedule that can run, and a plan of several."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.compile.build import build_program
from megatron_ext.compile.output_layer import place_output_layer
from megatron_ext.compile.overlap import is_gain
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import Choice, Mark, entries, entry_of
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
        layers: of the model; None: not known.
    """

    choice: Choice
    problem: Problem
    model: Sequence[ModelBytes] | None = None
    may_recompute: bool = False
    layers: int | None = None

    @property
    def build(self) -> Callable[[Choice, Problem], Program]:
        """What makes its program."""
        return build_program if self.problem.costs.held_bytes is None else place_output_layer

    def check_launch(self) -> None:
        """Raise ValueError if it could be simulated, and no launch could run it."""
        is_divided = self.problem.extras.vocab_parallel is not VocabularyParallel.NONE
        if is_divided and not is_line_or_v(self.problem.placement):
            raise ValueError("its vocabulary cannot be divided: only that of a line or a V can")


def goes_with(slices: Slices, choice: Choice, vocabulary: VocabularyParallel) -> bool:
    """Whether a schedule may be had with ``slices``, and ``vocabulary`` so divided."""
    is_whole = vocabulary is VocabularyParallel.NONE
    return slices.count == 1 or (choice.traits.takes_slices and is_whole)


def keeps_pairs(choice: Choice, vocabulary: VocabularyParallel) -> bool:
    """Whether a schedule, with ``vocabulary`` so divided, runs most F beside backward passes where
    that is asked for."""
    return entry_of(choice.spec).traits.keeps_pairs and vocabulary is VocabularyParallel.NONE


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
        is_whole: whether all microbatches were built, and none told by the repeating part.
    """

    method: VocabMethod
    report: ScheduleReport
    variant: Variant
    limit: MemoryLimit | None = None
    memory: tuple[RankMemory, ...] | None = None
    is_whole: bool = True

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


def by_time(candidate: Candidate) -> tuple[float, float]:
    return candidate.step, candidate.report.peak
