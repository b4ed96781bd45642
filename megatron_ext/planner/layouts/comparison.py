"""Comparison of a launch with other layouts, numbers of chunks, schedules, and recompute of layers.

All are within one memory bound: the memory that a GPU leaves, or that of the launch itself if that
is more. None takes more time than the launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from megatron_ext.base.progress import task
from megatron_ext.compile.registry import with_option
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.layouts.candidates import Candidates, LayoutRule, Permits, leanest_of
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.work import Evaluated, Work, evaluate
from megatron_ext.planner.planning_time import LAYOUTS, until_end

_MOST_CHUNKS = 8
# Largest number of chunk counts that are tried with schedules of megatron_ext: the fastest ones of
# Megatron's schedule.
_LOOPS = 3


@dataclass(frozen=True)
class LayoutComparison:
    """Comparison of a launch with the best results if more and more of it may change.

    A result is the one before it if nothing better is found.

    Attributes:
        baseline: the unchanged launch.
        chunks: Megatron's schedules with any number of chunks, layers on stages by Megatron's rule.
        stock: Megatron's schedules with any layers on stages.
        ours: any schedule with any layers on stages.
        leanest: of `ours` and the results that tie with it, the one that holds the least memory.
        bound: bytes that a rank may hold; None: there is no bound.
        refused: reasons against schedules that cannot be made or are not permitted.
        best_not_permitted: the best schedule that is not permitted, if it takes less time than
            `ours`.
    """

    baseline: Evaluated
    chunks: Evaluated
    stock: Evaluated
    ours: Evaluated
    leanest: Evaluated
    bound: float | None
    refused: Mapping[str, str] = field(default_factory=dict)
    best_not_permitted: Evaluated | None = None

    @property
    def others(self) -> dict[str, Evaluated]:
        """All results of the comparison except the launch itself, by their names."""
        return {
            "chunks": self.chunks,
            "stock": self.stock,
            "ours": self.ours,
            "leanest": self.leanest,
        }

    def gain(self, other: Evaluated) -> float:
        """Return by how much a step of the launch is longer than a step of ``other``, as a share of
        the latter."""
        return self.baseline.seconds / other.seconds - 1


def permit_all(spec: str, method: VocabMethod) -> None:
    """Permit every schedule with every vocabulary method, by raising no error (`Permits`)."""


def compare_layouts(
    works: Sequence[Work],
    baseline: tuple[str, Layout],
    rule: LayoutRule,
    allowed_bytes: float | None = None,
    *,
    permits: Permits = permit_all,
    search: bool = True,
    margin: float = 0.0,
) -> LayoutComparison:
    """Compare a training with other schedules and other layouts (layers of each stage).

    If the planning time ends before that is done (`planning_time`), the results are the best so
    far.

    Args:
        works: the training with its own recompute, then with others of Megatron's.
        baseline: the training's own schedule and layout.
        rule: the layout that Megatron makes by itself.
        allowed_bytes: bytes that a rank has for everything; None: as much as it takes.
        permits: raises ValueError for a schedule that is not permitted.
        search: whether the schedules compared last may search; if not, their results without a
            search count.
        margin: bytes that all results but the launch itself must leave unused.

    Raises:
        ValueError: ``baseline`` cannot be made.
    """
    work = works[0]
    with task("laying out stages") as progress:
        evaluated = evaluate(work, *baseline, search=search)
        bound = None if allowed_bytes is None else max(allowed_bytes, evaluated.fullest) - margin
        candidates = Candidates(works, bound, rule, permits, search, progress)
        loops = _with_chunks("interleaved", work, evaluated)
        chunks = _best_by_rule(candidates, ["1f1b", *loops], evaluated)
        stock = _best_by_layout(
            candidates, [["1f1b"], *([spec] for spec in loops)], evaluated, chunks
        )
        ladders = _ladders(work, sorted(loops, key=lambda spec: candidates.about.get(spec, inf)))
        ours = _best_by_layout(candidates, ladders, evaluated, stock, further=True)
        leanest = leanest_of([ours, *candidates.made])
        best_of_all = ours
        if candidates.not_permitted:
            all_permitted = Candidates(works, bound, rule, permit_all, search, progress)
            best_of_all = _best(ours, _best_by_layout(all_permitted, ladders, evaluated, stock))
    return LayoutComparison(
        evaluated,
        chunks,
        stock,
        ours,
        leanest,
        bound,
        refused=candidates.refused | candidates.not_permitted,
        best_not_permitted=None if best_of_all is ours else best_of_all,
    )


def _best_by_rule(candidates: Candidates, specs: Sequence[str], baseline: Evaluated) -> Evaluated:
    """Return the best of ``baseline`` and the schedules ``specs`` with Megatron's own layouts."""
    # `by_rule` adds each evaluated layout to `made`.
    until_end(partial(candidates.by_rule, specs), None, LAYOUTS)
    return _best(baseline, *candidates.made)


def _best_by_layout(
    candidates: Candidates,
    ladders: Sequence[Sequence[str]],
    baseline: Evaluated,
    before: Evaluated,
    *,
    further: bool = False,
) -> Evaluated:
    """Return the best of the result ``before`` and the schedules of ``ladders`` with any layout.

    ``further``: whether searches and a split vocabulary are then tried on the best layouts.
    """

    def work() -> None:
        made = candidates.by_layout(ladders, [baseline, before])
        if further:
            candidates.further(made, baseline)

    until_end(work, None, LAYOUTS)
    return _best(before, *candidates.made)


def _best(first: Evaluated, *others: Evaluated) -> Evaluated:
    """Return the evaluated result with the shortest step; of equals, the first."""
    return min([first, *others], key=lambda made: made.seconds)


def _with_chunks(name: str, work: Work, baseline: Evaluated) -> list[str]:
    """Return schedule ``name`` with each number of chunks a rank for which there are enough
    layers."""
    layers = len(work.model.layers)
    on_rank = layers // work.ranks
    even = (chunks for chunks in range(2, on_rank + 1) if on_rank % chunks == 0)
    numbers = {*range(2, _MOST_CHUNKS + 1), *even, baseline.candidate.report.vpp}
    return [
        with_option(name, "vpp", chunks)
        for chunks in sorted(numbers)
        if chunks > 1 and chunks * work.ranks <= layers + 1  # the last stage may have no layers
    ]


# Schedules without a search for each placement, from the most memory to the least. Of two with
# equal memory the one with the shorter step comes first.
_ON_LINE = ("zb-2p", "zb-1p")
_ON_V = ("zb-v", "v-half")
_ON_LOOP = ("interleaved-zb", "gis", "gis-h")


def _ladders(work: Work, loops: Sequence[str]) -> list[list[str]]:
    """Return schedules that need no search in groups of one placement, most memory first.

    They are this package's schedules, not Megatron's.

    Args:
        loops: Megatron's schedules on loops, fastest first.
    """
    ladders = [list(_ON_LINE)]
    if 2 * work.ranks <= len(work.model.layers) + 1:
        ladders.append(list(_ON_V))
    for spec in loops[:_LOOPS]:
        _, _, chunks = spec.partition(":")
        ladders.append([f"{name}:{chunks}" for name in _ON_LOOP])
    return ladders
