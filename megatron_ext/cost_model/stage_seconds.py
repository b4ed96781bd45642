"""Seconds of F, I and W of a stage, by operation and by the group of ranks that they wait for.

Estimates are scaled by measurements of single operations and groups, and overlapped where Megatron
overlaps them. The parts of a pass are therefore separate until the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.measured.scale import (
    DEPTH,
    EMBEDDING,
    OUTPUT_LAYER,
    PASS,
    Scale,
)
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.operations.ends import embedding, mtp_projection, output_layer
from megatron_ext.cost_model.operations.operation import Engine, Exchange, Group, Part
from megatron_ext.cost_model.operations.parts import part_of
from megatron_ext.cost_model.rates import Rates


class Other(StrEnum):
    """Costs of a pass that belong to no operation and no process group: launching its kernels."""

    LAUNCH = "launching"


Term = Engine | Group | Other
SecondsByTerm = Mapping[Term, float]


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of F, I and W, each split by the resource or process group that takes them.

    Attributes:
        rows: the seconds of W in matrices that tensor-parallel ranks partition by rows.
        squared: the seconds of F and of I that grow with the square of the sequence.
    """

    forward: SecondsByTerm = field(default_factory=dict)
    input_gradient: SecondsByTerm = field(default_factory=dict)
    weight_gradient: SecondsByTerm = field(default_factory=dict)
    rows: float = 0.0
    squared: tuple[float, float] = (0.0, 0.0)

    @property
    def totals(self) -> tuple[float, float, float]:
        """Total seconds of F, I and W over all resources and groups."""
        forward, backward, weights = (
            sum(seconds.values())
            for seconds in (self.forward, self.input_gradient, self.weight_gradient)
        )
        return forward, backward, weights

    def with_recompute(self) -> PassSeconds:
        """Return these seconds with F repeated in I, as for a layer that is recomputed."""
        recomputed = PassSeconds(input_gradient=self.forward, squared=(0.0, self.squared[0]))
        return summed([self, recomputed])

    def scaled(self, scale: Scale) -> PassSeconds:
        """Return these estimated seconds multiplied by ratios of measured to estimated ones."""
        return PassSeconds(
            _times(self.forward, scale.forward),
            _times(self.input_gradient, scale.input_gradient),
            _times(self.weight_gradient, scale.weight_gradient),
            self.rows * scale.weight_gradient,
            (self.squared[0] * scale.forward, self.squared[1] * scale.input_gradient),
        )


def _times(seconds: SecondsByTerm, scale: float) -> SecondsByTerm:
    return {term: figure * scale for term, figure in seconds.items()}


def summed(parts: Iterable[PassSeconds]) -> PassSeconds:
    """Return the sum of the seconds of several parts of a pass, by resource and group."""
    parts = list(parts)
    return PassSeconds(
        _summed(part.forward for part in parts),
        _summed(part.input_gradient for part in parts),
        _summed(part.weight_gradient for part in parts),
        sum(part.rows for part in parts),
        (sum(part.squared[0] for part in parts), sum(part.squared[1] for part in parts)),
    )


def _summed(terms: Iterable[SecondsByTerm]) -> SecondsByTerm:
    total: dict[Term, float] = defaultdict(float)
    for seconds in terms:
        for term, figure in seconds.items():
            total[term] += figure
    return dict(total)


@lru_cache(maxsize=4096)  # the result is cached, since layouts have the same stages many times
def seconds_of_layers(
    model: Model, stage: Stage, execution: Execution, rates: Rates
) -> PassSeconds:
    """Return the seconds of F, I and W in all layers of ``stage``, and of launching its passes.

    Layers of multi-token prediction are included; the embedding and the output layer are not.
    """
    return summed(seconds for _, seconds in seconds_by_component(model, stage, execution, rates))


def seconds_by_component(
    model: Model, stage: Stage, execution: Execution, rates: Rates
) -> Iterator[tuple[str, PassSeconds]]:
    """Yield each component of ``stage`` with its seconds of F, I and W.

    Components are each layer, named by its type, then depths of multi-token prediction, then the
    pass itself (`seconds_of_layers`).
    """
    for position, layer in enumerate(stage.layers):
        seconds = _of_layer(layer, execution.is_recomputed(position), model, execution, rates)
        yield layer, _measured(seconds, layer, rates)
    for _ in range(stage.depths):
        yield DEPTH, _measured(_of_depth(model, execution, rates), DEPTH, rates)
    launch: SecondsByTerm = {Other.LAUNCH: rates.launch} if rates.launch else {}
    yield PASS, _measured(PassSeconds(launch, launch), PASS, rates)


def seconds_of_embedding(model: Model, execution: Execution, rates: Rates) -> tuple[float, float]:
    """Return the seconds of the embedding's look-up (F), and of its table's gradient (W)."""
    forward, _, weights = rates.seconds_of(embedding(model, execution))
    measured = rates.measured
    if measured is None:
        return forward, weights
    scale = measured.of(EMBEDDING)
    return forward * scale.forward, weights * scale.weight_gradient


def seconds_of_output_layer(model: Model, execution: Execution, rates: Rates) -> PassSeconds:
    """Return the seconds of one run of the output layer, with the loss."""
    seconds = _of_part(output_layer(model, execution), execution, rates)
    return _measured(seconds, OUTPUT_LAYER, rates)


def _measured(estimated: PassSeconds, component: str, rates: Rates) -> PassSeconds:
    return estimated if rates.measured is None else estimated.scaled(rates.measured.of(component))


@lru_cache(maxsize=1024)
def _of_layer(
    layer: str, is_recomputed: bool, model: Model, execution: Execution, rates: Rates
) -> PassSeconds:
    parts = [_of_part(part_of(symbol, model, execution), execution, rates) for symbol in layer]
    return summed(parts).with_recompute() if is_recomputed else summed(parts)


def _of_depth(model: Model, execution: Execution, rates: Rates) -> PassSeconds:
    projection = _of_part(mtp_projection(model, execution), execution, rates)
    layer = _of_layer(model.mtp_layer, False, model, execution, rates)
    both = summed([projection, layer])
    return both.with_recompute() if execution.recompute else both


def _of_part(part: Part, execution: Execution, rates: Rates) -> PassSeconds:
    """Return the seconds of a layer's ``part``, such as attention.

    Operations that Megatron's selective recompute repeats count in I too.
    """
    modules = frozenset() if execution.recompute else execution.recompute_modules
    passes = []
    for operation in part.operations:
        if execution.is_frozen:
            operation = replace(operation, is_unsplit=False)
        f, i, w = rates.seconds_of(operation)
        recomputed = f if operation.modules & modules else 0.0
        term = operation.engine
        rows = w if operation.is_row else 0.0
        squared = f * operation.squared, (i + recomputed) * operation.squared
        passes.append(PassSeconds({term: f}, {term: i + recomputed}, {term: w}, rows, squared))
    for exchange in part.exchanges:
        f, i = _waited(exchange, part, rates)
        recomputed = f if exchange.modules & modules else 0.0
        passes.append(PassSeconds({exchange.group: f}, {exchange.group: i + recomputed}))
    return summed(passes)


def _waited(exchange: Exchange, part: Part, rates: Rates) -> tuple[float, float]:
    """Return the seconds of an ``exchange`` that attention does not overlap, in F and in I.

    If attention is recomputed in I, it overlaps the exchange of the repeated F alone.
    """
    f, i = rates.seconds_to_exchange(exchange)
    if exchange.is_behind_attention:
        for operation in part.operations:
            if operation.engine is Engine.ATTENTION:
                forward, backward, _ = rates.seconds_of(operation)
                f, i = f - forward, i - backward
    return max(f, 0.0), max(i, 0.0)
