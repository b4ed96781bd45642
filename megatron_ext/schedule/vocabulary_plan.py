"""What can be done about embedding and output layer, side by side for each schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_ext.schedule.choose import Plan
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.registry import choose
from megatron_ext.schedule.report import report
from megatron_ext.schedule.schedule import Problem, VocabularyParallel

REDISTRIBUTED = "redistributed"
WAYS = (REDISTRIBUTED, VocabularyParallel.ONE.value, VocabularyParallel.TWO.value)


def compare_ways(
    plan: Plan,
    ranks: int,
    microbatches: int,
    costs: Callable[[Placement], Costs],
    limit: MemoryLimit | None,
    layers: int | None = None,
    progress: Callable[[Sequence[str]], Iterable[str]] = lambda names: names,
) -> list[dict[str, Any]]:
    """For each schedule of ``plan`` the makespans of ``naive``, both on their stages;
    ``redistributed``, with fewer layers beside them (`redistribute`); vocabulary parallelism ``1``
    and ``2``. None where there is none; ``refused`` says why.

    Args:
        plan: `make_plan` with the same ranks, microbatches, costs and limit.
        layers: of the model, for the layers to be redistributed.

    Returns:
        nothing where the costs do not tell embedding and output layer apart.
    """
    makespans = {row["schedule"]: row["makespan"] for row in plan.reports}
    rows = []
    for name in progress(list(makespans)):
        choice = choose(name)
        placement = choice.place(ranks)
        problem = Problem(placement, microbatches, costs(placement), limit)
        if problem.costs.vocabulary is None:
            return []
        found: dict[str, float | None] = {}
        refused: dict[str, str] = {}
        for way in WAYS:
            if way == REDISTRIBUTED and layers is None:
                continue
            try:
                found[way] = report(choice, _changed(problem, way, layers))[1]["makespan"]
            except ValueError as error:
                found[way], refused[way] = None, str(error)
        rows.append({"schedule": name, "naive": makespans[name], **found, "refused": refused})
    return rows


def _changed(problem: Problem, way: str, layers: int | None) -> Problem:
    if way == REDISTRIBUTED:
        assert layers is not None
        return replace(problem, costs=redistribute(problem.costs, layers))
    return replace(problem, vocabulary=VocabularyParallel(way))


def redistribute(costs: Costs, layers: int) -> Costs:
    """``costs`` of ``layers`` equal layers, as Megatron spreads them when the output layer counts
    as one (``--account-for-loss-in-pipeline-split``), and the embedding too if only then they
    divide (``--account-for-embedding-in-pipeline-split``).

    Raises:
        ValueError: they do not divide.
    """
    stages = costs.stages
    for embeddings in (0, 1):
        each, left = divmod(layers + 1 + embeddings, stages)
        if not left:
            break
    else:
        raise ValueError(
            f"{layers} layers and the output layer do not divide over {stages} stages, nor with "
            f"the embedding: Megatron redistributes {_near(layers, stages)} layers"
        )
    counts = [each] * stages
    counts[0] -= embeddings
    counts[-1] -= 1
    alone = costs.without_vocabulary()

    def spread(figures: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(figures) / layers * count for count in counts)

    held = alone.held_bytes
    if held is not None:
        held = {kind: spread(figures) for kind, figures in held.items()}
    seconds = {duty: spread(figures) for duty, figures in alone.seconds.items()}
    moved = replace(alone, seconds=seconds, held_bytes=held)
    return moved if costs.vocabulary is None else moved.with_vocabulary(costs.vocabulary)


def _near(layers: int, stages: int) -> str:
    """Numbers of layers that can be redistributed, below and above ``layers``."""
    fit = [
        n for n in range(1, layers + stages + 1) if (n + 1) % stages == 0 or (n + 2) % stages == 0
    ]
    below, above = [n for n in fit if n < layers], [n for n in fit if n > layers]
    return " or ".join(map(str, [*below[-1:], above[0]]))
