"""What F, I and W of a stage take, and what of it is waiting for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from megatron_ext.schedule.model.execution import Execution
from megatron_ext.schedule.model.model import Model, Stage
from megatron_ext.schedule.model.operations.ends import embedding, output_layer, projection_of_depth
from megatron_ext.schedule.model.operations.operation import Engine, Exchange, Group, Part
from megatron_ext.schedule.model.operations.parts import part_of
from megatron_ext.schedule.model.rates import Rates


class Other(StrEnum):
    """What takes time in a pass beside operations and groups."""

    LAUNCH = "launching"


Term = Engine | Group | Other
Seconds = Mapping[Term, float]


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of F, I and W, by what takes them.

    Attributes:
        rows: of W, those of the last products of pairs that tensor-parallel ranks divide.
    """

    forward: Seconds = field(default_factory=dict)
    input_gradient: Seconds = field(default_factory=dict)
    weight_gradient: Seconds = field(default_factory=dict)
    rows: float = 0.0

    @property
    def totals(self) -> tuple[float, float, float]:
        """Of F, I and W."""
        forward, backward, weights = (
            sum(seconds.values())
            for seconds in (self.forward, self.input_gradient, self.weight_gradient)
        )
        return forward, backward, weights

    def run_again(self) -> PassSeconds:
        """With F in I once more."""
        again = summed([self, PassSeconds(input_gradient=self.forward)])
        return again


def summed(parts: Iterable[PassSeconds]) -> PassSeconds:
    """Their sum."""
    forward: Counter[Term] = Counter()
    backward: Counter[Term] = Counter()
    weights: Counter[Term] = Counter()
    rows = 0.0
    for part in parts:
        _add(forward, part.forward)
        _add(backward, part.input_gradient)
        _add(weights, part.weight_gradient)
        rows += part.rows
    return PassSeconds(dict(forward), dict(backward), dict(weights), rows)


def _add(total: Counter[Term], seconds: Seconds) -> None:
    for term, figure in seconds.items():
        total[term] += figure  # type: ignore[assignment]  # a Counter may count seconds


def seconds_of_layers(
    model: Model, stage: Stage, execution: Execution, rates: Rates
) -> PassSeconds:
    """What the layers of ``stage`` take, multi-token prediction's among them, but for the embedding
    and the output layer; and what its passes take by themselves."""
    layers = [
        _of_layer(layer, execution.is_again(position), model, execution, rates)
        for position, layer in enumerate(stage.layers)
    ]
    if stage.depths:
        layers += [_of_depth(model, execution, rates)] * stage.depths
    launch = {Other.LAUNCH: rates.launch} if rates.launch else {}
    return summed([*layers, PassSeconds(launch, launch)])


def seconds_of_embedding(model: Model, execution: Execution, rates: Rates) -> tuple[float, float]:
    """Of the look-up, and of its table's gradient."""
    forward, _, weights = rates.seconds_of(embedding(model, execution))
    return forward, weights


def seconds_of_output_layer(model: Model, execution: Execution, rates: Rates) -> PassSeconds:
    """Of one run, with the loss."""
    return _of_part(output_layer(model, execution), execution, rates)


@lru_cache(maxsize=1024)
def _of_layer(
    layer: str, is_again: bool, model: Model, execution: Execution, rates: Rates
) -> PassSeconds:
    parts = [_of_part(part_of(symbol, model, execution), execution, rates) for symbol in layer]
    return summed(parts).run_again() if is_again else summed(parts)


def _of_depth(model: Model, execution: Execution, rates: Rates) -> PassSeconds:
    projection = _of_part(projection_of_depth(model, execution), execution, rates)
    layer = _of_layer(model.mtp_layer, False, model, execution, rates)
    both = summed([projection, layer])
    return both.run_again() if execution.recompute else both


def _of_part(part: Part, execution: Execution, rates: Rates) -> PassSeconds:
    """What ``part`` takes; of it what Megatron's selective recompute runs again is in I."""
    forward: Counter[Term] = Counter()
    backward: Counter[Term] = Counter()
    weights: Counter[Term] = Counter()
    modules = frozenset() if execution.recompute else execution.recompute_modules
    rows = 0.0
    for operation in part.operations:
        f, i, w = rates.seconds_of(operation)
        again = f if operation.modules & modules else 0.0
        passes = ((forward, f), (backward, i + again), (weights, w))
        for total, figure in passes:
            _add(total, {operation.engine: figure})
        rows += w if operation.is_row else 0.0
    for exchange in part.exchanges:
        f, i = _waited(exchange, forward, backward, rates)
        again = f if exchange.modules & modules else 0.0
        _add(forward, {exchange.group: f})
        _add(backward, {exchange.group: i + again})
    return PassSeconds(dict(forward), dict(backward), dict(weights), rows)


def _waited(
    exchange: Exchange, forward: Seconds, backward: Seconds, rates: Rates
) -> tuple[float, float]:
    """What is left of ``exchange`` where attention hides the rest."""
    f, i = rates.seconds_to_exchange(exchange)
    if not exchange.is_behind_attention:
        return f, i
    return (
        max(f - forward.get(Engine.ATTENTION, 0.0), 0.0),
        max(i - backward.get(Engine.ATTENTION, 0.0), 0.0),
    )
