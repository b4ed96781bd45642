"""Comparison of a launch with other layouts, numbers of chunks, schedules, and recompute of layers.

All are within one memory bound: the memory that a GPU leaves, or that of the launch itself if that
is more. None takes more time than the launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from megatron_ext.compile.registry import with_option
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.layouts.candidates import Candidates, Permits, Rule
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.work import Evaluated, Work, evaluate
from megatron_ext.planner.planning_time import until_end
from megatron_ext.progress import task

_MOST_CHUNKS = 8
_LOOPS = 3  # numbers of chunks with which ours are tried: those that are best for stock's


@dataclass(frozen=True)
class Lines:
    """The launch, and the best of each kind: if nothing is better, the one before.

    Attributes:
        own: the launch as it is.
        chunks: stock's schedules with any number of chunks, layers on stages by Megatron's rule.
        stock: stock's schedules with any layout.
        ours: any schedule with any layout.
        bound: bytes that a rank may hold; None: there is no bound.
        refused: reasons why schedules are not among them.
        barred: the best that is not permitted, if that takes less than `ours`.
    """

    own: Evaluated
    chunks: Evaluated
    stock: Evaluated
    ours: Evaluated
    bound: float | None
    refused: Mapping[str, str] = field(default_factory=dict)
    barred: Evaluated | None = None

    @property
    def others(self) -> dict[str, Evaluated]:
        """All but the launch itself, by their kind."""
        return {"chunks": self.chunks, "stock": self.stock, "ours": self.ours}

    def gain(self, line: Evaluated) -> float:
        """Return the additional time of a step of the launch, as a share of that of ``line``."""
        return self.own.seconds / line.seconds - 1


def permit_all(spec: str, method: VocabMethod) -> None:
    """Permit all schedules."""


def compare_layouts(
    works: Sequence[Work],
    own: tuple[str, Layout],
    rule: Rule,
    room: float | None = None,
    *,
    permits: Permits = permit_all,
    search: bool = True,
    margin: float = 0.0,
) -> Lines:
    """Return the four lines of a training, of which ``own`` is the schedule and the layout as it
    is.

    If the time of the plan ends before (`planning_time`), they are the best so far.

    Args:
        works: the training as it is, and with other recompute of Megatron's.
        rule: the layout that Megatron makes by itself.
        room: bytes that a rank has for everything; None: as much as it takes.
        permits: called for each schedule that is not Megatron's.
        search: whether schedules that search do so where they are among the last; if not, what
            they know at once stands for them.
        margin: bytes that all but the launch command itself have to leave of that.

    Raises:
        ValueError: ``own`` cannot be made.
    """
    work = works[0]
    with task("laying out stages") as progress:
        of_own = evaluate(work, *own, search=search)
        bound = None if room is None else max(room, of_own.fullest) - margin
        candidates = Candidates(works, bound, rule, permits, search, progress)
        loops = _with_chunks("interleaved", work, of_own)
        specs = ["1f1b", *loops]
        nothing: list[Evaluated] = []
        until_end(partial(candidates.by_rule, specs), nothing)
        chunks = _best(of_own, *candidates.made)
        until_end(
            partial(candidates.by_layout, [[spec] for spec in specs], [of_own, chunks]), nothing
        )
        stock = _best(chunks, *candidates.made)
        ladders = _ladders(work, sorted(loops, key=lambda spec: candidates.about.get(spec, inf)))

        def of_ours() -> None:
            made = candidates.by_layout(ladders, [of_own, stock])
            candidates.further(made, of_own)

        until_end(of_ours, None)
        ours = _best(stock, *candidates.made)
        barred = None
        if candidates.barred:
            others = Candidates(works, bound, rule, permit_all, search, progress)
            until_end(partial(others.by_layout, ladders, [of_own, stock]), nothing)
            barred = _best(ours, *others.made)
    return Lines(
        of_own,
        chunks,
        stock,
        ours,
        bound,
        refused=candidates.refused | candidates.barred,
        barred=None if barred is ours else barred,
    )


def _best(first: Evaluated, *others: Evaluated) -> Evaluated:
    """Return the one that takes least; of equals, the first."""
    return min([first, *others], key=lambda made: made.seconds)


def _with_chunks(name: str, work: Work, own: Evaluated) -> list[str]:
    """Return the family ``name`` with each number of chunks that ``work`` has layers for."""
    layers = len(work.model.layers)
    on_rank = layers // work.ranks
    even = (chunks for chunks in range(2, on_rank + 1) if on_rank % chunks == 0)
    numbers = {*range(2, _MOST_CHUNKS + 1), *even, own.candidate.report.vpp}
    return [
        with_option(name, "vpp", chunks)
        for chunks in sorted(numbers)
        if chunks > 1 and chunks * work.ranks <= layers + 1  # the last stage may have none
    ]


# The schedules of a placement that take no search, from that which holds most to that which holds
# least. Where two hold as much, the one that takes less time.
_ON_LINE = ("zb-2p", "zb-1p")
_ON_V = ("zb-v", "v-half")
_ON_LOOP = ("interleaved-zb", "gis", "gis-h")


def _ladders(work: Work, loops: Sequence[str]) -> list[list[str]]:
    """Return our schedules, those of a placement together.

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
