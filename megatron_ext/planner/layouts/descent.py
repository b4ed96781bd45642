"""Layouts improved for a schedule, layer by layer, by simulation.

Balanced stages are not always the fastest: a rank that waits anyway can take more layers. Starting
from a balanced layout, layers are moved between stages as long as a simulated step gets shorter.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from megatron_ext.base.progress import Task
from megatron_ext.compile.output_layer import with_input_gradient
from megatron_ext.compile.pairs import with_pairs
from megatron_ext.compile.registry import ResolvedSpec, entry_of
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.minimax import is_layout, least_seconds, moves
from megatron_ext.planner.layouts.order import PERIODS_IN_PAIRS, Order
from megatron_ext.planner.layouts.stage_figures import Counts, StageFigures, busy
from megatron_ext.planner.limits import limit_left
from megatron_ext.schedule.action_arrays import Floats
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule

# Seconds that stand for a step which exceeds the memory; no real step takes so long.
_TOO_FULL = 1e12
# Number of times that a schedule is made anew for the best layout of the previous schedule.
_ORDERS = 3
_STEPS = 24  # largest number of moves of layers under one order of passes
_TIMED = 160  # number of possible moves that are simulated, the most promising ones
_TOGETHER = 10  # number of simulated moves of which two together are also tried
_AT_ONCE = 64  # number of layouts that are simulated together
_PERIODS = 3  # microbatches per rank of a short step that is simulated in place of a longer one
_BETTER = 1 - 1e-6
_OF_OTHERS = 1e-4  # weight of the summed work of all ranks relative to the length of the step


@dataclass(frozen=True)
class Start:
    """Schedule with a layout (layers of each stage) from which layers are moved to improve it.

    Attributes:
        figures: seconds and bytes of stages, with their recompute.
        seconds: approximate seconds of a step.
        fullest: approximate memory of the fullest rank, as a share of its limit; 0: no limit.
    """

    spec: str
    figures: StageFigures
    layout: Layout
    seconds: float
    fullest: float

    @property
    def fits(self) -> bool:
        return self.fullest <= 1


class Timed:
    """Order of passes of a schedule, made for one layout and used to time other layouts.

    Attributes:
        schedule: schedule of a step that may have fewer microbatches than the job's, so that timing
            is quick; with overlapped passes if these are requested.

    Raises:
        ValueError: the schedule cannot be made.
    """

    def __init__(
        self, spec: str, layout: Layout, figures: StageFigures, allowed_bytes: float | None
    ) -> None:
        work = figures.work
        variant = work.variant(spec, layout)
        self.spec = spec
        self._figures, self._allowed_bytes = figures, allowed_bytes
        self._placement, self._microbatches = variant.problem.placement, work.microbatches
        periods, rest = divmod(work.microbatches, work.ranks)
        told_by = PERIODS_IN_PAIRS if variant.problem.options.pairs else _PERIODS
        self._short = min(periods, told_by) * work.ranks + rest
        problem = replace(
            variant.problem,
            microbatches=self._short,
            costs=with_input_gradient(variant.problem.costs),
        )
        limit = work.limit or limit_left(variant, allowed_bytes)
        self.schedule = _ordered(variant.resolved.without_search, problem, limit)
        self._order = Order(self.schedule, problem.costs, problem.executor)

    def in_less(self, share: float) -> Timed:
        """Return the same order of passes, with memory limited to a ``share``."""
        other = copy.copy(self)
        other._allowed_bytes = self._allowed_bytes and share * self._allowed_bytes
        return other

    def by(self, figures: StageFigures) -> Timed:
        """Return the same order of passes, timed by other seconds of stages."""
        other = copy.copy(self)
        other._figures = figures
        return other

    def best_of(self, layouts: Sequence[Layout]) -> Start:
        """Return the layout with the shortest step of all that fit into memory.

        If none of ``layouts`` fits, all are compared by how far they exceed the memory.
        """
        counts = np.array([layout.layers for layout in layouts], dtype=np.int64)
        seconds, fullest = self._figured(counts)
        score = np.where(fullest > 1, _TOO_FULL * fullest, seconds)
        best = int(score.argmin())
        return Start(
            self.spec, self._figures, layouts[best], float(seconds[best]), float(fullest[best])
        )

    def descend(self, start: Layout, task: Task) -> Layout:
        """Return the layout ``start`` with layers moved until no move makes a step shorter.

        One or two layers are moved at a time. If a rank holds too much memory, layers are first
        moved until none does, if that is possible.
        """
        counts = np.array(start.layers, dtype=np.int64)
        score = self._scores(counts[None])[0]
        for _ in range(_STEPS):
            task.done += 1
            tried = self._promising(moves(counts), is_over=score >= _TOO_FULL)
            if not len(tried):
                break
            scores = self._scores(tried)
            together = _both(counts, tried[np.argsort(scores, kind="stable")[:_TOGETHER]])
            if len(together):
                tried = np.concatenate([tried, together])
                scores = np.concatenate([scores, self._scores(together)])
            best = int(scores.argmin())
            if scores[best] >= score * _BETTER:
                break
            counts, score = tried[best], scores[best]
        return self._figures.layout(counts.tolist())

    def _scores(self, counts: Counts) -> Floats:
        """Return a score of each layout: the seconds of a step plus a little of other ranks' work.

        Because of this addition, a move counts that helps one of several equally slow ranks.
        """
        firsts = range(0, len(counts), _AT_ONCE)
        parts = [self._figured(counts[n : n + _AT_ONCE]) for n in firsts]
        scores = [np.where(fullest > 1, _TOO_FULL * fullest, secs) for secs, fullest in parts]
        return np.concatenate(scores)

    def seconds(self, counts: Counts) -> Floats:
        """Return the seconds of the passes of a step for each layout in ``counts``."""
        return self._order.seconds(self._figures, counts, self._microbatches - self._short)

    def fullest_bytes(self, counts: Counts) -> Floats:
        """Return the bytes of the fullest rank for each layout in ``counts``."""
        return np.asarray(self._order.rank_bytes(self._of(counts)).max(axis=1))

    def _of(self, counts: Counts) -> Floats:
        """Return seconds and bytes of each stage for each layout in ``counts``."""
        return self._figures.of(counts, self._placement)

    def _figured(self, counts: Counts) -> tuple[Floats, Floats]:
        """Return for each layout the seconds of a step and the memory of the fullest rank.

        The memory is a share of the rank's limit.
        """
        figures = self._of(counts)
        work, stages_of = busy(figures), self._placement.stages_of
        ranks = np.stack([work[:, list(stages)].sum(axis=1) for stages in stages_of], axis=1)
        seconds = self.seconds(counts)
        seconds += _OF_OTHERS * self._microbatches * np.sqrt((ranks**2).mean(axis=1))
        if self._allowed_bytes is None:
            return seconds, np.zeros_like(seconds)
        return seconds, self.fullest_bytes(counts) / self._allowed_bytes

    def _promising(self, moved: Counts, *, is_over: bool) -> Counts:
        """Return those layouts whose ranks have the least work, at most `_TIMED` of them.

        If ``is_over``, a rank is too full, and those layouts are returned whose fullest rank has
        the least memory.
        """
        if len(moved) <= _TIMED:
            return moved
        if is_over:
            promises = self._order.rank_bytes(self._of(moved)).max(axis=1)
        else:
            figures = self._figures.after_overlap
            promises = least_seconds(moved, self._placement, self._microbatches, figures)
        return moved[np.argsort(promises, kind="stable")[:_TIMED]]


def _ordered(resolved: ResolvedSpec, problem: Problem, limit: MemoryLimit | None) -> Schedule:
    """Return the passes of schedule ``resolved`` within the memory ``limit``, overlapped if
    requested.

    If the schedule needs more, it is made within the limit of ``problem``, as another layout may
    leave it enough memory. A schedule that ignores costs overlaps all it can, whatever memory that
    takes, as Megatron's does.
    """
    within = replace(problem, memory_limit=limit)
    try:
        passes = resolved.build(within)
    except ValueError:
        within = problem
        passes = resolved.build(within)
    with contextlib.suppress(ValueError):  # a ValueError says that no two passes can overlap
        return with_pairs(passes, within if entry_of(resolved.spec).traits.uses_costs else problem)
    return passes


def _both(counts: Counts, moved: Counts) -> Counts:
    """Return layouts that apply two moves of layers at the same time.

    Each layout in ``moved`` is one move away from ``counts``.
    """
    pairs = [a + b - counts for a, b in combinations(moved, 2)]
    pairs = [joint for joint in pairs if is_layout(joint)]
    return np.array(pairs, dtype=np.int64).reshape(len(pairs), len(counts))


def descend(make: Callable[[Layout], Timed], start: Layout, task: Task) -> Start:
    """Return ``start`` with layers moved one by one until no move makes its step shorter.

    Args:
        make: function that returns the schedule's order of passes for a layout; the order is the
            same for all layouts if the schedule ignores costs.

    Raises:
        ValueError: the schedule cannot be made.
    """
    layout, timed = start, make(start)
    for _ in range(_ORDERS):
        better = timed.descend(layout, task)
        if better == layout:
            break
        layout, before = better, timed
        timed = make(layout)
        if timed is before:
            break
    return timed.best_of([layout])
