"""Costs of each type of layer, derived from measured stages.

A training measures passes of stages, which hold several types of layers. The measured sums tell the
types apart only if stages have them in different proportions; types that the sums do not tell apart
keep the proportions of the estimate.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.cost_model.activations import held_by_component
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.measured.least_squares import fit_scales
from megatron_ext.cost_model.measured.scale import (
    DEPTH,
    EMBEDDING,
    OUTPUT_LAYER,
    PASS,
    Scale,
)
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.stage_seconds import (
    seconds_by_component,
    seconds_of_embedding,
    seconds_of_output_layer,
)
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, TowerCosts
from megatron_ext.schedule.kinds import Held

MeasuredFigure = Kind | Held
# Measured seconds and bytes of a layer, in the order of the fields of `Scale`.
FIGURES: tuple[MeasuredFigure, ...] = (
    Kind.FORWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Held.ACTIVATION,
    Held.WEIGHT_INPUTS,
)
_SECONDS, _BYTES = FIGURES[:3], FIGURES[3:]
MeasuredFigures = Mapping[MeasuredFigure, float]


@dataclass(frozen=True)
class Basis:
    """Model, stages and rates of the estimate with which measured costs are compared.

    Attributes:
        has_tower: whether the first stage runs an encoder, for which no estimate exists.
    """

    model: Model
    stages: tuple[Stage, ...]
    execution: Execution
    rates: Rates
    has_tower: bool = False


@dataclass(frozen=True)
class LayerCosts:
    """Measured and estimated costs of a microbatch in each component of a model, such as a layer
    type.

    Attributes:
        measured: seconds and bytes of one instance; bytes only if they were measured.
        estimated: the same seconds and bytes as estimated with ``rates``.
        alike: groups of components that no stage tells apart; each group keeps the proportions of
            the estimate.
        stages: how many layers each stage had.
        tower: costs of a microbatch in an encoder on the first stage; None: there was none.
    """

    measured: Mapping[str, MeasuredFigures]
    estimated: Mapping[str, MeasuredFigures]
    rates: Rates
    alike: tuple[tuple[str, ...], ...]
    stages: tuple[int, ...]
    tower: TowerCosts | None = None

    def scales(self) -> tuple[tuple[str, Scale], ...]:
        """Return for each component the ratios of measured to estimated seconds and bytes."""
        return tuple(
            (name, _scale_of([(self.measured[name], self.estimated[name])]))
            for name in self.measured
        )

    @property
    def of_others(self) -> Scale:
        """Ratios of measured to estimated seconds and bytes, for layers of all types together."""
        not_layers = (DEPTH, EMBEDDING, OUTPUT_LAYER, PASS)
        layers = [name for name in self.measured if name not in not_layers]
        return _scale_of([(self.measured[name], self.estimated[name]) for name in layers])


def _scale_of(pairs: Sequence[tuple[MeasuredFigures, MeasuredFigures]]) -> Scale:
    scales = []
    for figure in FIGURES:
        measured, estimated = (
            sum(figures.get(figure, 0.0) for figures in column)
            for column in zip(*pairs, strict=True)
        )
        scales.append(measured / estimated if estimated else 1.0)
    return Scale(*scales)


def layer_costs(costs: Costs, basis: Basis, *, is_divided: bool) -> LayerCosts:
    """Return the costs of each component of a model, such as a layer type, from measured stages.

    Args:
        costs: measured costs of the stages.
        basis: the estimate whose proportions are used.
        is_divided: whether the vocabulary was partitioned over ranks, and measured by itself.
    """
    stages = [_expected(stage, basis) for stage in basis.stages]
    totals: _Expected = defaultdict(lambda: defaultdict(float))
    for stage in stages:
        for name, figures in stage.items():
            for figure, value in figures.items():
                totals[name][figure] += value
    numbers = _numbers(basis)
    measured: dict[str, dict[MeasuredFigure, float]] = {name: {} for name in totals}
    estimated: dict[str, dict[MeasuredFigure, float]] = {name: {} for name in totals}
    alike: list[set[str]] = []
    tower: dict[MeasuredFigure, float] = {}
    for figure in FIGURES:
        if isinstance(figure, Held) and costs.held_bytes is None:
            continue
        names = [name for name, figures in totals.items() if figures[figure]]
        rows, sums = _sums_of(costs, stages, totals, figure, is_divided)
        columns = [[row[name][figure] if name in row else 0.0 for name in names] for row in rows]
        # If the first stage runs an encoder, its sums include the encoder's time and tell nothing
        # about its layers, so they are not fitted.
        first = int(basis.has_tower)
        fit = fit_scales(np.array(columns[first:]), np.array(sums[first:]))
        if basis.has_tower:
            of_layers = float(np.dot(columns[0], fit.scales))
            tower[figure] = max(sums[0] - of_layers, 0.0)
        for name, scale in zip(names, fit.scales, strict=True):
            estimated[name][figure] = totals[name][figure] / numbers[name]
            measured[name][figure] = scale * estimated[name][figure]
        if isinstance(figure, Kind):
            alike += [{names[part] for part in group} for group in fit.alike]
    counts = tuple(len(stage.layers) for stage in basis.stages)
    of_tower = None
    if basis.has_tower:
        forward, backward, weights = (tower[kind] for kind in _SECONDS)
        of_tower = TowerCosts((forward, backward, weights), tower.get(Held.ACTIVATION, 0.0))
    groups = _joined(alike, list(totals))
    return LayerCosts(measured, estimated, basis.rates, groups, counts, of_tower)


def _joined(groups: Sequence[set[str]], order: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return ``groups`` of components after groups that share a member have been merged."""
    joined: list[set[str]] = []
    for group in groups:
        common = [other for other in joined if other & group]
        joined = [other for other in joined if other not in common] + [group.union(*common)]
    return tuple(tuple(name for name in order if name in group) for group in joined)


def alike_remark(components: Sequence[str]) -> str:
    """Return the remark for users about components that the measured stages do not tell apart."""
    *words, last = (_IN_WORDS.get(name, f"a layer {name}") for name in components)
    return (
        f"no stage tells {', '.join(words)} and {last} apart: they keep the proportions of the "
        f"estimate"
    )


_IN_WORDS = {
    DEPTH: "a depth of multi-token prediction",
    EMBEDDING: "the embedding",
    OUTPUT_LAYER: "the output layer",
    PASS: "the fixed cost of a pass",
}


_Expected = dict[str, dict[MeasuredFigure, float]]  # expected costs by model component


def _expected(stage: Stage, basis: Basis) -> _Expected:
    """Return the estimated seconds and bytes of each component on ``stage``, all instances
    together."""
    model, execution, rates = basis.model, basis.execution, basis.rates
    expected: _Expected = defaultdict(lambda: defaultdict(float))

    def add(name: str, figures: Sequence[MeasuredFigure], values: Sequence[float]) -> None:
        for figure, value in zip(figures, values, strict=True):
            expected[name][figure] += value

    for name, seconds in seconds_by_component(model, stage, execution, rates):
        add(name, _SECONDS, seconds.totals)
    for name, *held in held_by_component(model, stage, execution):
        add(name, _BYTES, held)
    if stage.embedding and model.vocabulary:
        forward, weights = seconds_of_embedding(model, execution, rates)
        add(EMBEDDING, _SECONDS, (forward, 0.0, weights))
    if stage.output_layer and model.vocabulary:
        run = seconds_of_output_layer(model, execution, rates)
        add(OUTPUT_LAYER, _SECONDS, [stage.output_runs * figure for figure in run.totals])
    return expected


def _sums_of(
    costs: Costs,
    stages: Sequence[_Expected],
    totals: _Expected,
    figure: MeasuredFigure,
    is_divided: bool,
) -> tuple[Sequence[_Expected], Sequence[float]]:
    """Return estimated seconds or bytes by component, and their measured sum, row by row.

    A row is a stage, or a part of a partitioned vocabulary. ``figure`` is a kind of pass or of
    memory.
    """
    layers = costs.without_vocabulary()
    if isinstance(figure, Held):
        assert layers.held_bytes is not None
        return stages, layers.held_bytes[figure]
    if not is_divided or costs.vocabulary is None:
        return stages, costs.seconds[figure]
    ends = (EMBEDDING, OUTPUT_LAYER)
    without = [{name: row[name] for name in row if name not in ends} for row in stages]
    sums = dict(zip(ends, costs.vocabulary.of_ends[figure], strict=True))
    partitioned = [name for name in ends if name in totals]
    rows = [*without, *({name: totals[name]} for name in partitioned)]
    return rows, [*layers.seconds[figure], *(sums[name] for name in partitioned)]


def _numbers(basis: Basis) -> dict[str, int]:
    """Return how many instances of each component (layer type, embedding, ...) the model has."""
    numbers = dict(Counter(basis.model.layers))
    depths = sum(stage.depths for stage in basis.stages)
    passes = len(basis.stages)
    return numbers | {DEPTH: depths, EMBEDDING: 1, OUTPUT_LAYER: 1 + depths, PASS: passes}
