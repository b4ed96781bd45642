"""Steps of a model whose first stage has a vision tower, and of pipelines with a slow rank or link.

    python -m scripts.benchmarks.uneven            all tables, about two minutes
    python -m scripts.benchmarks.uneven --ranks 0 4

80 equal layers take F : I : W = 10 : 12 : 8 on each of 8 ranks, and a message 1. No schedule stores
more microbatches on a rank than 1F1B. A step is compared with one that has no bubble and, for the
slow rank or link, with the same schedule on ranks and links that are all alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from megatron_ext.base.progress import task
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.planner.layouts.candidates import Candidates
from megatron_ext.planner.layouts.comparison import permit_all
from megatron_ext.planner.layouts.given import given_work
from megatron_ext.planner.layouts.layout import Layout, even_layout
from megatron_ext.planner.layouts.work import Evaluated, Work, evaluate
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem
from scripts.benchmarks.harness import arguments, print_table

LAYERS, RANKS = 80, 8
COSTS = "f=10,i=12,w=8,comm=1"
# Seconds of an encoder that costs 10 % of the language model: 0.1 x 8 ranks x 10, 12 and 8.
TOWERS = {"trained": "tower=8/9.6/6.4", "frozen": "tower=8/0/0"}
SLOW = 1.3
LINE, V = "zb-h1", "v-auto"


@dataclass(frozen=True)
class Steps:
    """Seconds of a step, divided by those of a reference step.

    Attributes:
        even: of a step with equally many layers on each stage.
        laid_out: of a step with the best layout that was found.
        layout: the best layout that was found.
    """

    even: float
    laid_out: float
    layout: Layout


def work_of(costs: str, microbatches: int, speeds: tuple[float, ...] = ()) -> Work:
    """Return the planner's description of the job, within the memory of 1F1B.

    Args:
        costs: costs of a rank, as text.
        speeds: speed of each rank relative to the others; () if all are equally fast.
    """
    work = given_work(
        parse_costs(costs, line(RANKS)), LAYERS, ranks=RANKS, microbatches=microbatches
    )
    return replace(work, limit=parse_limit("1x", RANKS, microbatches), speeds=speeds)


def without_bubble(costs: str, microbatches: int) -> float:
    """Return the seconds of a step whose ranks all work from its start to its end."""
    seconds = parse_costs(costs, line(RANKS)).seconds.values()
    return microbatches * sum(map(sum, seconds)) / RANKS


def best_layout(work: Work, spec: str, *, search: bool = True) -> Evaluated:
    """Return the shortest step that the planner finds for ``work`` under the schedule ``spec``."""
    started_from = "zb-v" if spec == V else spec
    even = partial(even_layout, work.model)
    with task("laying out stages") as progress:
        candidates = Candidates([work], None, even, permit_all, search, progress)
        made = candidates.by_layout([[started_from]], [])
        if search and spec == V:
            found = evaluate(work, started_from, even(2 * RANKS))
            made = sorted([*made, *candidates.further(made, found)], key=lambda one: one.seconds)
    return made[0]


def with_tower(trained: str, spec: str, microbatches: int = 16, *, search: bool = True) -> Steps:
    """Return how long a step of a model with a vision tower takes, divided by the time of a step
    without any bubble.

    Args:
        trained: whether the tower is ``trained`` or ``frozen``, a key of `TOWERS`.
    """
    costs = f"{COSTS},{TOWERS[trained]}"
    ideal = without_bubble(costs, microbatches)
    return _steps(work_of(costs, microbatches), spec, ideal, search)


def with_slow_rank(rank: int, spec: str, microbatches: int = 32, *, search: bool = True) -> Steps:
    """Return how long a step with a slow ``rank`` takes, divided by the time of a step of ``spec``
    on ranks that are equally fast."""
    speeds = tuple(1 / SLOW if number == rank else 1.0 for number in range(RANKS))
    alike = _on_even_layers(work_of(COSTS, microbatches), spec, search)
    return _steps(work_of(COSTS, microbatches, speeds), spec, alike, search)


def with_slow_link(
    link: int, p2p_seconds: float, spec: str, microbatches: int = 32, ranks: int = RANKS
) -> tuple[float, float]:
    """Return steps with slow messages between rank ``link`` and the next rank.

    The first step runs in the order that ``spec``, which searches, finds for equal links, and the
    second one in the order that it finds for the slow link. Both are divided by the step on equal
    links.

    Args:
        p2p_seconds: seconds of a message over the slow link.
    """
    resolved = choose(spec)
    placement = resolved.place(ranks)
    alike = uniform(placement, 10, 12, 8, 1)
    between = [sorted(neighbours) for neighbours in pairwise(placement.rank_of)]
    of_links = tuple(0.0 if a == b else p2p_seconds if a == link else 1.0 for a, b in between)
    slow = alike.with_links(
        p2p_seconds_by_stage=of_links, p2p_seconds=sum(of_links) / len(of_links)
    )
    limit = parse_limit("1x", ranks, microbatches)
    before, after = (
        build_program(resolved, Problem(placement, microbatches, costs, limit))
        for costs in (alike, slow)
    )
    reference = simulate(before, alike).makespan
    fixed, found = (simulate(program, slow).makespan for program in (before, after))
    return fixed / reference, min(fixed, found) / reference


def _steps(work: Work, spec: str, reference: float, search: bool) -> Steps:
    made = best_layout(work, spec, search=search)
    even = _on_even_layers(work, spec, search)
    return Steps(even / reference, made.seconds / reference, made.layout)


def _on_even_layers(work: Work, spec: str, search: bool) -> float:
    tried = ("zb-v", V) if spec == V else (spec,)
    stages = (2 if spec == V else 1) * RANKS
    even = even_layout(work.model, stages)
    return min(evaluate(work, one, even, search=search).seconds for one in tried)


def layout_rows(ranks: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table on layouts: with a tower, and with each of ``ranks`` slow."""

    def row(name: str, spec: str, steps: Steps) -> tuple[str, ...]:
        layers = " ".join(map(str, steps.layout.layers))
        return name, spec, f"{steps.even:.3f}", f"{steps.laid_out:.3f}", layers

    for trained in TOWERS:
        for spec in ("1f1b", LINE, V):
            yield row(f"tower of 10 %, {trained}, m = 16", spec, with_tower(trained, spec))
    for rank in ranks:
        for spec in (LINE, V):
            name = f"rank {rank} takes {SLOW} times as long, m = 32"
            yield row(name, spec, with_slow_rank(rank, spec))


def link_rows() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table on slow links."""
    for link in (0, RANKS // 2 - 1, RANKS - 2):
        for p2p_seconds in (5.0, 10.0, 20.0):
            for spec in ("zb-auto", V):
                fixed, found = with_slow_link(link, p2p_seconds, spec)
                yield (
                    f"ranks {link} and {link + 1}",
                    f"{p2p_seconds:g}",
                    spec,
                    f"{fixed:.3f}",
                    f"{found:.3f}",
                )


def main(words: Sequence[str] | None = None) -> int:
    given = arguments(__doc__, words, ranks=(tuple(range(RANKS)), "that are slow, one at a time"))
    layers = ("", "schedule", "even layers", "laid out", "layers of the stages")
    print_table(layers, layout_rows(given.ranks))
    links = ("slow link", "its message takes", "schedule", "order for equal links", "new order")
    print_table(links, link_rows())
    return 0


if __name__ == "__main__":
    sys.exit(main())
