"""Costs of a model whose embedding and output layer are partitioned over all ranks.

Costs of users and of estimates have both tables on the first and the last stage. Partitioned, each
rank has a share of their seconds and bytes, in passes of its own.
"""

from __future__ import annotations

import operator
from dataclasses import replace

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, VocabularyCosts
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import VocabularyParallel


def share_vocabulary(costs: Costs, placement: Placement, how: VocabularyParallel) -> Costs:
    """Return ``costs`` with embedding and output layer split into a shard on each rank.

    The shards belong to the first stage of each rank. If ``costs`` do not give embedding and output
    layer separately, these stay where they are and the shards cost nothing.
    """
    assert how is not VocabularyParallel.NONE and costs.unpartitioned is None
    layers, vocabulary = costs.without_vocabulary(), costs.vocabulary or VocabularyCosts()
    layers = layers.with_copies_of(costs)
    slowness = costs.slowness or (1.0,) * costs.stages
    forward, input_gradient, weight_gradient = (
        part / slowness[-1] for part in vocabulary.output_layer
    )
    lookup, table_gradient = (part / slowness[0] for part in vocabulary.embedding)
    # With method 2 the input gradient is computed together with the logits.
    early = how is VocabularyParallel.TWO
    launch = vocabulary.launch * placement.ranks
    shards = {
        Kind.LOGITS: forward + (input_gradient if early else 0.0) + launch,
        Kind.LOGITS_INPUT: 0.0 if early else input_gradient + launch,
        Kind.LOGITS_WEIGHT: weight_gradient + vocabulary.rescaling,
        Kind.LOSS: 0.0,
        Kind.EMBEDDING: lookup,
        Kind.EMBEDDING_WEIGHT: table_gradient,
    }
    divided = {
        kind: tuple(map(operator.mul, _divided(seconds, placement), slowness))
        for kind, seconds in shards.items()
    }
    held = layers.held_bytes
    if held is not None:
        held = {**held, Held.LOGITS: _divided(vocabulary.logits_bytes, placement)}
    in_forward, in_backward = vocabulary.contention
    slower = {
        kind: tuple(
            seconds * (1 + (in_forward if kind is Kind.FORWARD else in_backward))
            for seconds in figures
        )
        for kind, figures in layers.seconds.items()
    }
    return replace(
        layers.with_passes(seconds={**slower, **divided}, held_bytes=held),
        unpartitioned=costs,
    )


def _divided(amount: float, placement: Placement) -> tuple[float, ...]:
    shards = {row[0] for row in placement.stages_of}
    return tuple(
        amount / placement.ranks if stage in shards else 0.0 for stage in range(placement.stages)
    )
