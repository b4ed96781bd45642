"""Parts of a model, with their estimated seconds, for predictions from a trace.

A trace of Megatron's own step has seconds of whole passes. To predict a schedule with other stages,
they have to be split over layers, embedding, output layer and tower. The estimate gives the
proportions, and the measured passes the scale.
"""

from __future__ import annotations

from collections import defaultdict

from megatron_ext.cost_model.measured.layer_costs import Basis
from megatron_ext.cost_model.measured.scale import DEPTH, EMBEDDING, OUTPUT_LAYER, PASS
from megatron_ext.cost_model.stage_seconds import (
    seconds_by_component,
    seconds_of_embedding,
    seconds_of_output_layer,
)
from megatron_ext.cost_model.tower_costs import tower_costs
from megatron_ext.observe.fitted_parts import ModelParts, PassTriple

_TOWER = "vision tower"


def model_parts_of(basis: Basis) -> ModelParts | None:
    """Return the model's parts with their estimated seconds; None if its vision tower is unknown.

    ``basis`` is the basis of the estimate.
    """
    model, execution, rates = basis.model, basis.execution, basis.rates
    if basis.has_tower and model.tower is None:
        return None
    found: dict[str, list[PassTriple]] = defaultdict(list)
    for stage in basis.stages:
        for name, seconds in seconds_by_component(model, stage, execution, rates):
            found[name].append(seconds.totals)
    first: dict[str, PassTriple] = {}
    if model.vocabulary:
        forward, weights = seconds_of_embedding(model, execution, rates)
        first[EMBEDDING] = (forward, 0.0, weights)
    if model.tower is not None:
        first[_TOWER] = tower_costs(model.tower, execution, rates).seconds
    last: dict[str, PassTriple] = {}
    if model.vocabulary:
        runs = basis.stages[-1].output_runs
        last[OUTPUT_LAYER] = _sum([seconds_of_output_layer(model, execution, rates).totals] * runs)
    return ModelParts(
        tuple((*stage.layers, *[DEPTH] * stage.depths) for stage in basis.stages),
        {name: _mean(found[name]) for name in (*dict.fromkeys(model.layers), DEPTH) if found[name]},
        first,
        last,
        _mean(found[PASS]),
    )


def _sum(triples: list[PassTriple]) -> PassTriple:
    forward, inputs, weights = map(sum, zip(*triples, strict=True))
    return forward, inputs, weights


def _mean(triples: list[PassTriple]) -> PassTriple:
    forward, inputs, weights = _sum(triples)
    return forward / len(triples), inputs / len(triples), weights / len(triples)
