"""Seconds and bytes of any part of a model's layers as a stage, looked up for many layouts at once.

Layouts of one model have the same stages over and over: some layers from here to there. The seconds
and bytes of each such part are computed once, and a layout is a row of numbers into that table.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_ext.cost_model.model import Stage
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.overlap_saving import OverlapSaving
from megatron_ext.planner.layouts.work import Work
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.action_arrays import Floats
from megatron_ext.schedule.costs import Costs, VocabularyCosts
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import Placement, line
from megatron_ext.schedule.problem import VocabularyParallel
from megatron_ext.schedule.rank_speeds import slowness_of

Counts = NDArray[np.int64]  # numbers of layers, in an array of shape (stages) or (layouts, stages)

_NEVER = 1e9  # seconds that rule out a stage which Megatron does not build


class End(IntEnum):
    """Parts of the model that a stage has after its layers, such as the output layer."""

    NOTHING = 0
    # The last stage, with the output layer and the loss, and with multi-token prediction unless
    # another stage has it.
    LOSS = 1
    PREDICTION = 2  # a stage with multi-token prediction but without the loss


class Figure(IntEnum):
    """Columns of a table of stages: seconds, then bytes, of a microbatch on a stage."""

    FORWARD = 0
    INPUT = 1
    WEIGHT = 2
    # Seconds that are saved if the weight gradient runs right after the input gradient.
    FUSED_BACKWARD_SAVING = 3
    ACTIVATION = 4  # bytes that are stored from F to I
    LEFT = 5  # bytes that are stored from I to W
    MODEL = 6  # bytes of parameters, gradients and optimizer states
    # Bytes of temporary tensors and of CUDA's context. A rank needs the largest number of its
    # stages.
    BESIDES = 7


_SECONDS = Figure.FUSED_BACKWARD_SAVING + 1  # number of the columns above that are seconds


class StageFigures:
    """Table of the seconds and bytes of stages, each computed once, for many layouts.

    The output layer's weight gradient counts with its input gradient, where most schedules have it
    (`output_layer`).

    Attributes:
        overlap_saving: seconds that overlapped passes hide, by the rows of the two stages.

    Args:
        separates_prediction: whether multi-token prediction is on the stage before the loss's,
            which then has no layers.
        is_after_overlap: whether the time that a stage's F hides by overlapping with the stage's
            own backward pass is subtracted from the seconds of the weight gradient. Layers are
            balanced by such figures.
    """

    def __init__(
        self, work: Work, *, separates_prediction: bool = False, is_after_overlap: bool = False
    ) -> None:
        self.work = work
        self.separates_prediction = separates_prediction
        self._is_after_overlap = is_after_overlap
        size = len(work.model.layers) + 1
        # Row in the table of seconds and bytes for a stage, by whether it is the first stage, by
        # its end, and by its layers.
        self._rows = np.full((2, len(End), size, size), -1, dtype=np.int64)
        self._row_of: dict[Stage, int] = {}
        self._stages: list[Stage] = []
        self.overlap_saving = OverlapSaving(work, self._stages)
        self._table = np.empty((0, len(Figure)))

    def of(self, counts: Counts, placement: Placement) -> Floats:
        """Return seconds and bytes of stages, an array of layouts x stages x `Figure`.

        The seconds are those at the speeds of the ranks that hold the stages by ``placement``.
        """
        rows = self.rows(counts)  # the call may add rows to the table
        figures = np.asarray(self._table[rows])
        slowness = self.slowness(placement)
        if slowness is not None:
            figures[..., :_SECONDS] *= slowness[:, None]
        return figures

    def slowness(self, placement: Placement) -> Floats | None:
        """Return for each stage the factor by which its rank slows it down; None if ranks are
        equally fast."""
        speeds = self.work.speeds
        return np.array(slowness_of(placement, speeds)) if speeds else None

    def rows(self, counts: Counts) -> Counts:
        """Return the row in the table for each layout and stage; equal stages have the same row."""
        ends = np.cumsum(counts, axis=1)
        starts = ends - counts
        is_first, of_ends = np.zeros_like(counts), np.zeros_like(counts)
        is_first[:, 0] = 1
        of_ends[:, -1] = End.LOSS
        if self.separates_prediction:
            of_ends[:, -2] = End.PREDICTION
        where = is_first, of_ends, starts, ends
        unknown = self._rows[where] < 0
        if unknown.any():
            for key in set(zip(*(part[unknown].tolist() for part in where), strict=True)):
                self._rows[key] = self._row(*key)
        return np.asarray(self._rows[where])

    @cached_property
    def after_overlap(self) -> StageFigures:
        """Table by which layers are balanced, without the time that overlapped passes hide.

        It is this table itself if no passes overlap.
        """
        if not self.work.pairs:
            return self
        return StageFigures(
            self.work, separates_prediction=self.separates_prediction, is_after_overlap=True
        )

    def layout(self, counts: Sequence[int]) -> Layout:
        """Return the layout with ``counts`` layers on its stages, and its multi-token
        prediction."""
        depths: tuple[int, ...] = ()
        if self.separates_prediction:
            depths = (*[0] * (len(counts) - 2), self.work.model.mtp_num_layers, 0)
        return Layout(tuple(counts), depths)

    @cached_property
    def tower_seconds(self) -> float:
        """Seconds of a microbatch in the encoder on the first stage; 0 without an encoder."""
        layers = self.work.model.layers
        stages = Stage(layers[:1], embedding=True), Stage(layers[:1], output_layer=True)
        tower = self.work.costs_of(stages, line(2), 1).tower
        return 0.0 if tower is None else sum(tower.seconds)

    def piece(
        self, start: int, end: int, *, is_first: bool = False, behind: End = End.NOTHING
    ) -> Floats:
        """Return seconds and bytes of a stage with the layers from ``start`` to before ``end``.

        ``behind`` names the parts of the model that follow these layers on the stage.
        """
        key = int(is_first), int(behind), start, end
        if self._rows[key] < 0:
            self._rows[key] = self._row(*key)
        return np.asarray(self._table[self._rows[key]])

    def _row(self, is_first: int, behind: int, start: int, end: int) -> int:
        model = self.work.model
        has_all = model.mtp_num_layers > 0 and end == len(model.layers) > start
        is_last = behind == End.LOSS
        predicts = behind == (End.PREDICTION if self.separates_prediction else End.LOSS)
        stage = Stage(
            model.layers[start:end],
            embedding=bool(is_first),
            depths=model.mtp_num_layers if predicts else 0,
            output_layer=is_last,
            earlier_depths=model.mtp_num_layers if is_last and not predicts else 0,
            ends_layers=has_all and not is_last,
        )
        if stage not in self._row_of:
            # The planning time may end at any of these statements, and the plan may go on with the
            # table. So a stage is noted after its row is in the table, and a row whose stage was
            # not noted is dropped.
            figures, number = self._figures(stage), len(self._stages)
            self._table = np.vstack([self._table[:number], figures])
            self._stages.append(stage)
            self._row_of[stage] = number
        return self._row_of[stage]

    def _figures(self, stage: Stage) -> Floats:
        # A second stage with one layer is described together with this stage, since a model without
        # layers would have no costs.
        companion = Stage(self.work.model.layers[:1])
        figures = figures_of_stage(self.work.costs_of((companion, stage), line(2), 1), 1, stage)
        if self._is_after_overlap:
            figures[Figure.WEIGHT] -= self.overlap_saving.with_itself(stage)
        # With several ranks the bytes are those of a pipeline of both stages, since a pipeline of
        # one rank would have no communicator.
        stages = (stage,) if self.work.ranks == 1 else (companion, stage)
        *_, of_model = self.work.bytes_of(stages, line(len(stages)), VocabularyParallel.NONE)
        figures[Figure.MODEL] = of_model.stored
        figures[Figure.BESIDES] = of_model.total - of_model.stored
        if stage.earlier_depths and stage.layers:
            figures[Figure.FORWARD] = _NEVER
        return figures


def figures_of_stage(costs: Costs, number: int, stage: Stage) -> Floats:
    """Return seconds and bytes of ``stage``, which has this ``number`` in ``costs``.

    Bytes of the model itself are not included.
    """
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
    """Return the compute seconds of a microbatch on each stage, from the table of stages."""
    passes = figures[..., [Figure.FORWARD, Figure.INPUT, Figure.WEIGHT]]
    return np.asarray(passes.sum(axis=-1))
