"""Parts of a model along its pipeline, whose times are fitted to the measured passes of stages.

A stage's pass is the sum of its parts: layers, those of multi-token prediction among them, on the
first stage the embedding and a tower, on the last the output layer. The measured sums determine the
seconds of each part as far as they can be solved for. Parts that the sums cannot separate keep the
proportions of the estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_ext.cost_model.measured.scale import DEPTH

# Positions of passes in a triple of F, I and W.
FORWARD, BACKWARD, WEIGHT = slice(0, 1), slice(1, 3), slice(2, 3)
PassTriple = tuple[float, float, float]  # seconds of F, I and W

_EACH = "each pass"
_DISTINGUISHABLE = 0.02  # singular values below this share of the largest one are taken for noise
# The estimate of a model part is in doubt if the stages' seconds leave more than this share of it
# undetermined.
_UNSEEN = 0.05
_COUNTS = 0.01  # a model part below this share of every stage is not reported as in doubt
# factor by which the seconds of a part may be wrong if no stage tells it apart from others
DOUBT = 2.0


@dataclass(frozen=True)
class ModelParts:
    """Parts of a model along its pipeline, such as layers by type, with estimated seconds.

    Attributes:
        layers: the types of the layers of each stage; `DEPTH` for a layer of multi-token
            prediction.
        of_layer: seconds of F, I and W in one layer, by type.
        first, last: seconds of the parts that the first and the last stage have in addition, by
            name.
        each: seconds that each pass takes in addition.
    """

    layers: tuple[tuple[str, ...], ...]
    of_layer: Mapping[str, PassTriple]
    first: Mapping[str, PassTriple]
    last: Mapping[str, PassTriple]
    each: PassTriple = (0.0, 0.0, 0.0)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the model's parts, in the order of the columns of tables."""
        return (*self.of_layer, *self.first, *self.last, _EACH)

    def counts(self, layers: Sequence[Sequence[str]]) -> NDArray[np.float64]:
        """Return a table of how often each stage (row) has each part of the model (column).

        ``layers`` are the types of the layers on each stage.
        """
        table = np.zeros((len(layers), len(self.names)))
        for row, kinds in enumerate(layers):
            for kind in kinds:
                table[row, self.names.index(kind)] += 1
        table[0, [self.names.index(name) for name in self.first]] = 1
        table[-1, [self.names.index(name) for name in self.last]] = 1
        table[:, -1] = 1
        return table

    def seconds(self, passes: slice) -> NDArray[np.float64]:
        """Return the estimated seconds of each part of the model in some of F, I and W.

        ``passes`` selects from these three.
        """
        triples = (*self.of_layer.values(), *self.first.values(), *self.last.values(), self.each)
        return np.array(triples)[:, passes].sum(1)

    @property
    def has_depths(self) -> bool:
        """Whether some stage has layers of multi-token prediction."""
        return any(DEPTH in stage for stage in self.layers)

    def evenly(self, stages: int) -> list[list[str]] | None:
        """Return the types of the layers of each stage after an even cut into ``stages`` stages.

        None if the layers cannot be cut evenly. Multi-token prediction is on the last stage, where
        Megatron has it without a layout.
        """
        all_layers = [kind for stage in self.layers for kind in stage]
        layers = [kind for kind in all_layers if kind != DEPTH]
        number, rest = divmod(len(layers), stages)
        if rest or not number:
            return None
        cut = [layers[at : at + number] for at in range(0, len(layers), number)]
        cut[-1] += [DEPTH] * all_layers.count(DEPTH)
        return cut

    def doubted(self) -> Iterator[ModelParts]:
        """Yield copies of this model with other estimates for parts that passes cannot separate."""
        table = self.counts(self.layers)
        doubtful: set[str] = set()
        for passes in (FORWARD, BACKWARD):
            expected = table * self.seconds(passes)
            unseen = 1 - np.diag(np.linalg.pinv(expected, rcond=_DISTINGUISHABLE) @ expected)
            shares = (expected / np.maximum(expected.sum(1, keepdims=True), 1e-30)).max(0)
            doubtful |= {
                name
                for name, part, share in zip(self.names, unseen, shares, strict=True)
                if part > _UNSEEN and share > _COUNTS
            }
        for name in sorted(doubtful):
            for factor in (DOUBT, 1 / DOUBT):
                yield self._with(name, factor)

    def _with(self, name: str, factor: float) -> ModelParts:
        def scaled(triples: Mapping[str, PassTriple]) -> dict[str, PassTriple]:
            return {
                key: (f * factor, i * factor, w * factor) if key == name else (f, i, w)
                for key, (f, i, w) in triples.items()
            }

        return replace(
            self,
            of_layer=scaled(self.of_layer),
            first=scaled(self.first),
            last=scaled(self.last),
            each=scaled({_EACH: self.each})[_EACH],
        )

    def fitted(
        self, measured: Sequence[float], passes: slice, stages: Sequence[Sequence[str]]
    ) -> NDArray[np.float64]:
        """Return the seconds of each part (column) on each of ``stages`` (row), fitted to a trace.

        A part takes equally long on all stages. Over all traced stages together, the parts add up
        to the ``measured`` seconds of their ``passes``.
        """
        table = self.counts(self.layers)
        sums = np.array(measured)
        expected = table * self.seconds(passes)
        expected *= sums.sum() / max(expected.sum(), 1e-30)
        scales = 1 + np.linalg.pinv(expected, rcond=_DISTINGUISHABLE) @ (sums - expected.sum(1))
        fitted = expected * np.maximum(scales, 0.0)
        # The remaining difference is due to a slower rank or to noise: each part keeps its share of
        # the stage.
        fitted *= (sums / np.maximum(fitted.sum(1), 1e-30))[:, None]
        of_one = fitted.sum(0) / np.maximum(table.sum(0), 1.0)
        return self.counts(stages) * of_one
