"""The orders of passes that are compared: Megatron's interleaved 1F1B, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import batched

import numpy as np

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.build.output_layer import with_input_gradient
from megatron_ext.schedule.build.registry import choose
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.plan.layouts.figures import Figure, StageFigures
from megatron_ext.schedule.plan.layouts.layout import Layout
from megatron_ext.schedule.plan.layouts.work import Work
from scripts.recipes.pairs.filling import Room, filled
from scripts.recipes.pairs.hiding import Hiding, Pair
from scripts.recipes.pairs.order import Rows


@dataclass(frozen=True)
class Ordered:
    """What an order is made of: the schedule with this ``spec``.

    Attributes:
        ahead: forward passes more than usual before the first backward pass, on a loop.
        fills: whether W are put into gaps; else they are where the schedule has them.
    """

    spec: str
    ahead: int = 0
    fills: bool = False
    is_stock: bool = False

    @property
    def name(self) -> str:
        return self.spec + (f" +{self.ahead}" if self.ahead else "") + (" W" if self.fills else "")

    def placement(self, ranks: int) -> Placement:
        return choose(self.spec).place(ranks)


def rows_of(
    ordered: Ordered,
    work: Work,
    layout: Layout,
    microbatches: int,
    figures: StageFigures,
    hiding: Hiding | None,
    room: float | None,
) -> Rows:
    """The passes of ``ordered`` with ``layout``.

    Raises:
        ValueError: they cannot be.
    """
    placement = ordered.placement(work.ranks)
    if placement.name == "loop":
        backward = Kind.BACKWARD_INPUT if ordered.fills else Kind.FULL_BACKWARD
        rows = _loop(placement, microbatches, backward, ordered.ahead)
    else:
        variant = work.variant(ordered.spec, layout)
        costs = with_input_gradient(variant.problem.costs)
        problem = replace(variant.problem, microbatches=microbatches, costs=costs)
        rows = variant.choice.without_search.build(problem).compute_rows
        if ordered.fills:
            rows = [_without_weights(row) for row in rows]
    if not ordered.fills:
        return rows
    return _filled(rows, placement, work, layout, figures, hiding, room)


def _without_weights(row: Sequence[Action]) -> list[Action]:
    return [
        action._replace(kind=Kind.BACKWARD_INPUT)
        if action.kind is Kind.FULL_BACKWARD
        else action
        for action in row
        if action.kind is not Kind.BACKWARD_WEIGHT
    ]


def _loop(placement: Placement, microbatches: int, backward: Kind, ahead: int) -> Rows:
    """Megatron's order, with so many forward passes more ``ahead`` of backward passes."""
    p = placement.ranks
    if microbatches % p:
        raise ValueError(f"{microbatches} microbatches are no multiple of {p} ranks")
    groups = list(batched(range(microbatches), p))
    rows = []
    for rank, stages in enumerate(placement.stages_of):
        lead = (placement.chunks - 1) * p + 2 * (p - rank) - 1 + ahead
        there = [Action(s, Kind.FORWARD, k) for ks in groups for s in stages for k in ks]
        back = [Action(s, backward, k) for ks in groups for s in reversed(stages) for k in ks]
        row = there[:lead]
        for n, action in enumerate(back):
            row += [action, *there[lead + n : lead + n + 1]]
        rows.append(row)
    return rows


def _filled(
    rows: Rows,
    placement: Placement,
    work: Work,
    layout: Layout,
    figures: StageFigures,
    hiding: Hiding | None,
    room: float | None,
) -> Rows:
    counts = np.array([layout.layers])
    of_stages = figures.of(counts)[0]
    seconds = {
        Kind.FORWARD: of_stages[:, Figure.FORWARD].tolist(),
        Kind.BACKWARD_INPUT: of_stages[:, Figure.INPUT].tolist(),
        Kind.BACKWARD_WEIGHT: of_stages[:, Figure.WEIGHT].tolist(),
    }
    pairs = [Pair(f, b, False) for stages in placement.stages_of for f in stages for b in stages]
    hidden: dict[tuple[int, int], float] = {}
    if hiding is not None:
        table = hiding.of_pairs(pairs, counts)[:, 0].tolist()
        hidden = {(f, b): figure for (f, b, _), figure in zip(pairs, table, strict=True)}

    def lasts(passes: tuple[Action, ...]) -> float:
        whole = sum(seconds[action.kind][action.stage] for action in passes)
        if len(passes) == 1:
            return whole
        f, b = passes
        return whole - hidden.get((f.stage, b.stage), 0.0)

    costs = work.costs_of(layout.of(work.model), placement)
    kept = of_stages[:, Figure.ACTIVATION] + costs.message_bytes
    model = of_stages[:, Figure.MODEL]
    bounds = [
        (room or np.inf) - sum(model[stage] for stage in stages) for stages in placement.stages_of
    ]
    of_rows = Room(bounds, kept.tolist(), of_stages[:, Figure.LEFT].tolist())
    return filled(rows, placement, lasts, costs.hop, of_rows, hiding is not None)
