"""Figures of any part of a model's layers as a stage, looked up for many layouts at once."""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_ext.cost_model.model import Stage
from megatron_ext.planner.layouts.overlap_saving import OverlapSaving
from megatron_ext.planner.layouts.work import Work
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.action_arrays import Floats
from megatron_ext.schedule.costs import Costs, VocabularyCosts
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import Placement, line
from megatron_ext.schedule.problem import VocabularyParallel
from megatron_ext.schedule.rank_speeds import slowness_of

Counts = NDArray[np.int64]  # layers of each stage; by layout where there are several


class Figure(IntEnum):
    """Figure of a microbatch on a stage: seconds, then bytes."""

    FORWARD = 0
    INPUT = 1
    WEIGHT = 2
    FUSED_BACKWARD_SAVING = 3  # where the weight gradient comes right behind the input gradient
    ACTIVATION = 4  # held from F to I
    LEFT = 5  # held from I to W
    MODEL = 6  # of parameters, gradients and optimizer states
    BESIDES = 7  # of temporary tensors and CUDA's context: once on a rank, the most of its stages


_SECONDS = Figure.FUSED_BACKWARD_SAVING + 1  # so many figures are seconds


class StageFigures:
    """Figures of stages of ``work``, each made once.

    The output layer's weight gradient counts with its input gradient, where most schedules have it
    (`output_layer`).

    Attributes:
        overlap_saving: seconds that overlapped passes hide, by their rows.

    Args:
        is_after_overlap: whether the weight gradient of a stage is without the time that its F
            hides if it overlaps with its own backward pass: layers are balanced by that.
    """

    def __init__(self, work: Work, *, is_after_overlap: bool = False) -> None:
        self.work = work
        self._is_after_overlap = is_after_overlap
        size = len(work.model.layers) + 1
        # The row of a stage by whether it is the first, or the last, and where it starts and ends.
        self._rows = np.full((2, 2, size, size), -1, dtype=np.int64)
        self._row_of: dict[Stage, int] = {}
        self._stages: list[Stage] = []
        self.overlap_saving = OverlapSaving(work, self._stages)
        self._table = np.empty((0, len(Figure)))

    def of(self, counts: Counts, placement: Placement) -> Floats:
        """Return the figures by layout, stage and `Figure`, at the speeds of the ranks that hold
        the stages by ``placement``."""
        rows = self.rows(counts)  # which may make some
        figures = np.asarray(self._table[rows])
        slowness = self.slowness(placement)
        if slowness is not None:
            figures[..., :_SECONDS] *= slowness[:, None]
        return figures

    def slowness(self, placement: Placement) -> Floats | None:
        """Return how many times as long each stage of ``placement`` takes on its rank; None if all
        ranks are alike."""
        speeds = self.work.speeds
        return np.array(slowness_of(placement, speeds)) if speeds else None

    def rows(self, counts: Counts) -> Counts:
        """Return the rows of stages by layout and stage; equal stages have the same row."""
        ends = np.cumsum(counts, axis=1)
        starts = ends - counts
        is_first, is_last = np.zeros_like(counts), np.zeros_like(counts)
        is_first[:, 0] = is_last[:, -1] = 1
        where = is_first, is_last, starts, ends
        unknown = self._rows[where] < 0
        if unknown.any():
            for key in set(zip(*(part[unknown].tolist() for part in where), strict=True)):
                self._rows[key] = self._row(*key)
        return np.asarray(self._rows[where])

    @cached_property
    def after_overlap(self) -> StageFigures:
        """Figures to balance layers by: the same, or with the time that overlapped passes hide."""
        return StageFigures(self.work, is_after_overlap=True) if self.work.pairs else self

    @cached_property
    def tower_seconds(self) -> float:
        """Seconds of a microbatch in the encoder on the first stage; 0 without one."""
        layers = self.work.model.layers
        stages = Stage(layers[:1], embedding=True), Stage(layers[:1], output_layer=True)
        tower = self.work.costs_of(stages, line(2)).tower
        return 0.0 if tower is None else sum(tower.seconds)

    def piece(
        self, start: int, end: int, *, is_first: bool = False, is_last: bool = False
    ) -> Floats:
        """Return the figures of one stage with the layers from ``start`` to before ``end``."""
        key = int(is_first), int(is_last), start, end
        if self._rows[key] < 0:
            self._rows[key] = self._row(*key)
        return np.asarray(self._table[self._rows[key]])

    def _row(self, is_first: int, is_last: int, start: int, end: int) -> int:
        model = self.work.model
        has_all = model.mtp_num_layers > 0 and end == len(model.layers) > start
        stage = Stage(
            model.layers[start:end],
            embedding=bool(is_first),
            depths=model.mtp_num_layers if is_last else 0,
            output_layer=bool(is_last),
            ends_layers=has_all and not is_last,
        )
        if stage not in self._row_of:
            self._row_of[stage] = len(self._table)
            self._stages.append(stage)
            self._table = np.vstack([self._table, self._figures(stage)])
        return self._row_of[stage]

    def _figures(self, stage: Stage) -> Floats:
        companion = Stage(self.work.model.layers[:1])  # costs of nothing at all are none
        figures = figures_of_stage(self.work.costs_of((companion, stage), line(2)), 1, stage)
        if self._is_after_overlap:
            figures[Figure.WEIGHT] -= self.overlap_saving.with_itself(stage)
        # A pipeline of one rank would have no communicator.
        stages = (stage,) if self.work.ranks == 1 else (companion, stage)
        *_, of_model = self.work.bytes_of(stages, line(len(stages)), VocabularyParallel.NONE)
        figures[Figure.MODEL] = of_model.stored
        figures[Figure.BESIDES] = of_model.total - of_model.stored
        return figures


def figures_of_stage(costs: Costs, number: int, stage: Stage) -> Floats:
    """Return the figures of ``stage``, the one of this ``number`` in ``costs``, without those of
    the model."""
    ends, layers = costs.vocabulary or VocabularyCosts(), costs.layers_alone
    figures = np.zeros(len(Figure))
    figures[Figure.FORWARD] = layers.seconds[Kind.FORWARD][number]
    figures[Figure.INPUT] = layers.seconds[Kind.BACKWARD_INPUT][number]
    figures[Figure.WEIGHT] = layers.seconds[Kind.BACKWARD_WEIGHT][number]
    figures[Figure.FUSED_BACKWARD_SAVING] = layers.fused_backward_saving_on(number)
    if layers.held_bytes is not None:
        figures[Figure.ACTIVATION] = layers.held_bytes[Held.ACTIVATION][number]
        figures[Figure.LEFT] = layers.held_bytes[Held.WEIGHT_INPUTS][number]
    if stage.embedding:
        lookup, table_gradient = ends.embedding
        figures[Figure.FORWARD] += lookup
        figures[Figure.WEIGHT] += table_gradient
    if stage.embedding and costs.tower is not None:
        figures[[Figure.FORWARD, Figure.INPUT, Figure.WEIGHT]] += costs.tower.seconds
        figures[Figure.ACTIVATION] += costs.tower.activation
    if stage.output_layer:
        forward, input_gradient, weight_gradient = ends.output_layer
        figures[Figure.FORWARD] += forward
        figures[Figure.INPUT] += input_gradient + weight_gradient
        figures[Figure.ACTIVATION] += ends.logits_bytes
    return figures


def busy(figures: Floats) -> Floats:
    """Return the seconds of a microbatch on each stage, from its figures."""
    passes = figures[..., [Figure.FORWARD, Figure.INPUT, Figure.WEIGHT]]
    return np.asarray(passes.sum(axis=-1))
