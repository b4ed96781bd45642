"""Removal of backward passes: of all in evaluations, and of those before the first trained stage.

With frozen towers and embeddings, or adapters on the later layers, nothing in the first stages has
a weight gradient, and the gradients that later stages would send back are of no use. Neither I nor
W (nor B) runs there, and no gradient is sent to them.

The remaining actions keep the order of the whole schedule, and through its waits its pace.
Otherwise the first stages, which have little to do, would run ahead, and their messages would pile
up at the others.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.compile.program.graph import has_place
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule


def keep_forward(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule`` for an evaluation: without backward passes and everything else that only
    training needs."""
    rows = tuple(
        tuple(action for action in row if RULES[action.kind].in_evaluation) for row in schedule.rows
    )
    return replace(schedule, rows=rows, pairs=frozenset())


def drop_frozen_prefix(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule`` without the backward passes of the first stages, which have no training.

    ``schedule`` has its messages and waits. The stages are those before
    `Problem.first_trained_stage`.
    """

    def stays(action: Action) -> bool:
        return has_place(
            action.kind,
            action.stage,
            problem.placement,
            first_trained_stage=problem.first_trained_stage,
        )

    return replace(
        schedule,
        rows=tuple(tuple(action for action in row if stays(action)) for row in schedule.rows),
        pairs=frozenset(overlapped for overlapped in schedule.pairs if all(map(stays, overlapped))),
    )


def without_backward(costs: Costs, first_trained_stage: int) -> Costs:
    """Return ``costs`` in which the stages before ``first_trained_stage`` have only forward passes.

    These stages store nothing.
    """

    def cut(figures: tuple[float, ...]) -> tuple[float, ...]:
        return (0.0,) * first_trained_stage + figures[first_trained_stage:]

    layers, vocabulary = costs.without_vocabulary(), costs.vocabulary
    passes = layers.seconds
    seconds = {
        kind: figures if kind is Kind.FORWARD else cut(figures) for kind, figures in passes.items()
    }
    held = layers.held_bytes
    if held is not None:
        held = {what: cut(figures) for what, figures in held.items()}
    changed = layers.with_passes(seconds=seconds, held_bytes=held)
    if vocabulary is not None:
        lookup, _ = vocabulary.embedding
        changed = changed.with_vocabulary(replace(vocabulary, embedding=(lookup, 0.0)))
    return changed.with_copies_of(costs)
