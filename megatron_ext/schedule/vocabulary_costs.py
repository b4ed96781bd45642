"""Costs of a model whose embedding and output layer are divided over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_ext.schedule.costs import Costs, VocabularyCosts
from megatron_ext.schedule.kinds import Duty, Held
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import VocabularyParallel

_UNKNOWN = VocabularyCosts(head=(0.0, 0.0, 0.0))


def share_vocabulary(costs: Costs, placement: Placement, how: VocabularyParallel) -> Costs:
    """``costs`` without embedding and output layer on the first and the last stage, and with a
    shard of both beside each rank's first stage.

    Where ``costs`` do not tell them apart, they stay where they are and the shards cost nothing.
    """
    assert how is not VocabularyParallel.NONE and costs.whole is None
    vocabulary = costs.vocabulary or _UNKNOWN
    forward, input_gradient, weight_gradient = vocabulary.head
    lookup, table_gradient = vocabulary.embedding
    early = how is VocabularyParallel.TWO  # the input gradient's product is made with the logits
    ends = {
        Duty.FORWARD: (lookup, forward),
        Duty.INPUT_GRADIENT: (0.0, input_gradient),
        Duty.WEIGHT_GRADIENT: (table_gradient, weight_gradient),
    }
    shards = {
        Duty.LOGITS: forward + (input_gradient if early else 0.0),
        Duty.LOGITS_INPUT_GRADIENT: 0.0 if early else input_gradient,
        Duty.LOGITS_WEIGHT_GRADIENT: weight_gradient,
        Duty.LOSS: 0.0,
        Duty.EMBEDDING: lookup,
        Duty.EMBEDDING_WEIGHT_GRADIENT: table_gradient,
    }
    seconds = {duty: _without(costs.seconds[duty], *end) for duty, end in ends.items()}
    seconds |= {duty: _divided(whole, placement) for duty, whole in shards.items()}
    held = costs.held_bytes
    if held is not None:
        held = _shared_bytes(held, vocabulary.logits_bytes, placement)
    return replace(costs, seconds=seconds, held_bytes=held, vocabulary=None, whole=costs)


def _shared_bytes(
    held: Mapping[Held, tuple[float, ...]], logits: float, placement: Placement
) -> dict[Held, tuple[float, ...]]:
    layers = (Held.ACTIVATION, Held.WEIGHT_INPUTS)
    return {kind: _without(held[kind], 0.0, logits) for kind in layers} | {
        Held.LOGITS: _divided(logits, placement)
    }


def _without(figures: tuple[float, ...], first: float, last: float) -> tuple[float, ...]:
    """``figures`` of the stages, less those of the two layers. (Rounding may leave less than 0.)"""
    less = list(figures)
    less[0] -= first
    less[-1] -= last
    return tuple(max(figure, 0.0) for figure in less)


def _divided(whole: float, placement: Placement) -> tuple[float, ...]:
    shards = {row[0] for row in placement.stages_of}
    return tuple(
        whole / placement.ranks if stage in shards else 0.0 for stage in range(placement.stages)
    )
