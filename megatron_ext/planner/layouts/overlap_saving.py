"""Time of experts' messages that overlapped passes hide, looked up for many layouts.

How much a pair of passes saves depends on the layers of both stages. Each two stages are computed
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from megatron_ext.cost_model.model import Stage
from megatron_ext.planner.layouts.work import Work
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import line

# Key of two overlapped passes: stage of the forward pass, stage of the backward pass, and kind of
# the backward pass.
PairedStages = tuple[int, int, Kind]


class OverlapSaving:
    """Seconds that overlapped forward and backward passes save, looked up for any two stages.

    Further stages may be added to ``stages``.
    """

    def __init__(self, work: Work, stages: Sequence[Stage]) -> None:
        self._work, self._stages = work, stages
        self._seconds = cache(self._of)

    def by_layout(
        self, pairs: Sequence[PairedStages], numbers: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the seconds saved by overlapped passes, for each two stages and each layout.

        Args:
            pairs: stage of F, stage of the backward pass, and the kind of that pass.
            numbers: numbers of the stages in the table of stages, by layout and stage.
        """
        if not pairs:
            return np.zeros((0, len(numbers)))
        forwards, backwards, kinds = zip(*pairs, strict=True)
        size = len(self._stages)
        looked_up = numbers[:, list(forwards)] * size + numbers[:, list(backwards)]
        looked_up = 2 * looked_up + np.array([kind is Kind.FULL_BACKWARD for kind in kinds])
        distinct, places = np.unique(looked_up, return_inverse=True)
        seconds = [
            self._seconds(*divmod(both, size), bool(full_backward))
            for both, full_backward in (divmod(code, 2) for code in distinct.tolist())
        ]
        return np.asarray(np.array(seconds)[places.reshape(looked_up.shape)].T)

    def with_itself(self, stage: Stage) -> float:
        """Return the seconds saved if F of ``stage`` overlaps a whole backward pass of the same
        stage.

        This is about as much as overlapped passes of a rank with equal stages save.
        """
        return self._saved(stage, stage, full_backward=True)

    def _of(self, there: int, back: int, full_backward: bool) -> float:
        return self._saved(self._stages[there], self._stages[back], full_backward=full_backward)

    def _saved(self, there: Stage, back: Stage, *, full_backward: bool) -> float:
        kind = Kind.FULL_BACKWARD if full_backward else Kind.BACKWARD_INPUT
        costs = self._work.costs_of((there, back), line(2), 1)
        return costs.overlap_saving(Action(0, Kind.FORWARD, 0), Action(1, kind, 0))
