"""Layouts that are balanced, without any simulation.

A simulation for each layout would be too slow, as there are millions. The time of the slowest
stage, or of the slowest rank, is a lower bound on the time of a step. Layouts for which this bound
is small are found without simulation, and a search by simulation begins with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.stage_figures import Counts, End, Figure, StageFigures, busy
from megatron_ext.schedule.action_arrays import Floats
from megatron_ext.schedule.placement import Placement

_STEPS = 64  # largest number of moves of one layer
_OF_OTHERS = 0.01  # weight of the summed work of all ranks relative to the work of the slowest rank
_SAME = 1e-9


def least_slowest_stage(
    layers: int, placement: Placement, figures: StageFigures, *, with_ends: bool = True
) -> Layout:
    """Return the layout whose slowest stage takes the least time, by dynamic programming.

    Each stage has a layer at least, the last one perhaps none. The time of a stage is taken as the
    sum over its layers, although tensor-parallel ranks may hide some time in a stage that has
    several layers.

    Args:
        with_ends: whether the first and the last stage have the embedding and the output layer. An
            encoder is on the first stage in any case.
    """
    alone = [busy(figures.piece(n, n + 1)) for n in range(layers)]
    of_stage = 0.0  # time of a stage that does not depend on its layers
    if layers > 1:
        of_stage = float(alone[0] + alone[1] - busy(figures.piece(0, 2)))
    first, last = figures.tower_seconds, 0.0
    if with_ends:
        first = float(busy(figures.piece(0, 1, is_first=True)) - alone[0])
        behind = End.PREDICTION if figures.separates_prediction else End.LOSS
        last = float(busy(figures.piece(layers - 1, layers, behind=behind)) - alone[-1])
    upto = np.concatenate([[0.0], np.cumsum(np.array(alone) - of_stage)])
    starts, ends = np.ogrid[: layers + 1, : layers + 1]
    work = np.where(ends > starts, of_stage + upto[ends] - upto[starts], np.inf)
    of_last = of_stage + upto[-1] - upto + last
    # The last stage that may have layers comes right before the stage with the loss.
    if figures.separates_prediction:
        loss = float(busy(figures.piece(layers, layers, behind=End.LOSS)))
        of_last = np.where(np.arange(layers + 1) == layers, loss, np.inf)
        parts = [work[0] + first, *[work] * (placement.stages - 3), work + last, of_last]
    else:
        parts = [work[0] + first, *[work] * (placement.stages - 2), of_last]
    slowness = figures.slowness(placement)
    if slowness is not None:
        parts = [part * slower for part, slower in zip(parts, slowness, strict=True)]
    least, _ = _partition(parts, np.maximum)
    # Several partitions may have the least maximum: the one with the most equal parts is chosen.
    squares = [np.where(part <= least * (1 + _SAME), part**2, np.inf) for part in parts]
    _, counts = _partition(squares, np.add)
    return figures.layout(counts)


def _partition(parts: Sequence[Floats], joined: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """Return the split of layers over stages with the least ``joined`` (maximum or sum) of times.

    The first result is this least value, the second the number of layers of each stage.

    Args:
        parts: arrays of the times of the stages, in order: the first stage's by the layer at which
            it ends, the middle stages' by the layers at which they start and end, the last stage's
            by the layer at which it starts.
    """
    best, *between, of_last = parts
    cuts = []
    for of_stage in between:
        made = joined(best[:, None], of_stage)
        cuts.append(made.argmin(axis=0))
        best = made.min(axis=0)
    totals = joined(best, of_last)
    end = int(totals.argmin())
    least, counts = float(totals[end]), [len(of_last) - 1 - end]
    for cut in reversed(cuts):
        start = int(cut[end])
        counts.append(end - start)
        end = start
    return least, (end, *reversed(counts))


def with_even_ranks(
    layout: Layout, placement: Placement, microbatches: int, figures: StageFigures
) -> Layout:
    """Return ``layout`` with layers moved one by one until the slowest rank gets no faster.

    The time of a rank is the sum of its work, the time until the first microbatch reaches it, and
    the time that the last gradient takes back to the first stage.
    """
    counts = np.array(layout.layers, dtype=np.int64)
    score = _scores(counts[None], placement, microbatches, figures)[0]
    for _ in range(_STEPS):
        moved = moves(counts)
        if not len(moved):
            break
        scores = _scores(moved, placement, microbatches, figures)
        best = int(scores.argmin())
        if scores[best] >= score * (1 - _SAME):
            break
        counts, score = moved[best], scores[best]
    return figures.layout(counts.tolist())


def moves(counts: Counts) -> Counts:
    """Return all layouts that move one layer of a layout from one stage to another.

    ``counts`` are the layers of each stage. Each stage keeps a layer, the last one perhaps none.
    """
    stages = len(counts)
    givers = np.flatnonzero(counts > _least(stages))
    pairs = [(giver, taker) for giver in givers.tolist() for taker in range(stages)]
    pairs = [(giver, taker) for giver, taker in pairs if giver != taker]
    moved = np.repeat(counts[None], len(pairs), axis=0)
    for row, (giver, taker) in zip(moved, pairs, strict=True):
        row[giver] -= 1
        row[taker] += 1
    return moved


def is_layout(counts: Counts) -> bool:
    """Return whether each stage has a layer; only the last one may have none."""
    return bool((counts >= _least(len(counts))).all())


def _least(stages: int) -> Counts:
    """Return the least number of layers of each stage: 1, and 0 for the last stage."""
    least = np.ones(stages, dtype=np.int64)
    least[-1] = 0
    return least


def least_seconds(
    counts: Counts, placement: Placement, microbatches: int, figures: StageFigures
) -> Floats:
    """Return a lower bound on the seconds of a step for each layout in ``counts``.

    The bound is that of the slowest rank: the sum of its work, the time until the first microbatch
    reaches it, and the time that the last gradient takes back to the first stage.
    """
    return _by_rank(counts, placement, microbatches, figures).max(axis=1)


def _scores(
    counts: Counts, placement: Placement, microbatches: int, figures: StageFigures
) -> Floats:
    """Return a score of each layout: `least_seconds` plus a little of other ranks' work.

    Because of this addition, a move counts that helps one of several equally slow ranks.
    """
    by_rank = _by_rank(counts, placement, microbatches, figures)
    others = np.sqrt((by_rank**2).mean(axis=1))
    return np.asarray(by_rank.max(axis=1) + _OF_OTHERS * others)


def _by_rank(
    counts: Counts, placement: Placement, microbatches: int, figures: StageFigures
) -> Floats:
    of_stages = figures.of(counts, placement)
    forward = of_stages[..., Figure.FORWARD]
    back = of_stages[..., Figure.INPUT]
    work = busy(of_stages)
    arrival = np.cumsum(forward, axis=1) - forward
    rest = np.cumsum(back, axis=1) - back
    ranks = [
        microbatches * work[:, list(stages)].sum(axis=1)
        + arrival[:, stages[0]]
        + rest[:, stages[0]]
        for stages in placement.stages_of
    ]
    return np.stack(ranks, axis=1)
