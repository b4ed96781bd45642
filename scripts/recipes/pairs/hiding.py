"""What pairs of stages hide, looked up for many layouts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from megatron_ext.schedule.model.execution import Execution
from megatron_ext.schedule.model.measured.scale import DEPTH
from megatron_ext.schedule.model.model import Model, Stage
from megatron_ext.schedule.model.pairs import PairedLayer, paired_layers
from megatron_ext.schedule.model.rates import Rates
from megatron_ext.schedule.plan.layouts.figures import Counts, Floats


class Pair(NamedTuple):
    """F of a stage, and a backward pass of another or the same."""

    forward: int
    backward: int
    with_weights: bool


@dataclass(frozen=True, eq=False)
class Hiding:
    """Of a model's layers where so large a ``share`` of experts' messages can go on beside other
    work. 0: none, and there are no pairs."""

    model: Model
    execution: Execution
    rates: Rates
    share: float
    _layers: dict[str, PairedLayer] = field(default_factory=dict)

    def of_pairs(self, pairs: Sequence[Pair], counts: Counts) -> Floats:
        """Seconds, by pair and layout."""
        hidden = cache(self._hidden)
        stages = [self._stages(layout) for layout in counts.tolist()]
        rows = [[hidden(of[f], of[b], w) for of in stages] for f, b, w in pairs]
        return np.array(rows, dtype=float).reshape(len(pairs), len(counts))

    def alone(self, counts: Counts) -> Floats:
        """What a whole backward pass hides by itself, behind its own W, by stage and layout."""
        alone = cache(self._alone)
        rows = [[alone(stage) for stage in self._stages(layout)] for layout in counts.tolist()]
        return np.array(rows, dtype=float).T

    def _stages(self, layout: Sequence[int]) -> list[tuple[str, ...]]:
        starts = np.cumsum([0, *layout]).tolist()
        stages = [
            self.model.layers[a:b] for a, b in zip(starts[:-1], starts[1:], strict=True)
        ]
        stages[-1] = (*stages[-1], *[DEPTH] * self.model.mtp_num_layers)
        return stages

    def _hidden(self, there: tuple[str, ...], back: tuple[str, ...], with_weights: bool) -> float:
        beside = zip(there, reversed(back), strict=False)
        return sum(
            self._layer(f).hidden_beside(self._layer(b), self.share, with_weights=with_weights)
            for f, b in beside
        )

    def _alone(self, stage: tuple[str, ...]) -> float:
        layers = map(self._layer, stage)
        return sum(
            min(self.share * layer.input_gradient_messages, layer.weight_gradient)
            for layer in layers
        )

    def _layer(self, name: str) -> PairedLayer:
        if name not in self._layers:
            stage = Stage((), depths=1) if name == DEPTH else Stage((name,))
            (self._layers[name],) = paired_layers(self.model, stage, self.execution, self.rates)
        return self._layers[name]
