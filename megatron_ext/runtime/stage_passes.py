"""Passes of a rank's stages: F, R, I, B, W, and pairs of a forward and a backward pass.

Each kind of pass is one method of a stage. Here its input is fetched, features may act around it,
and its result goes to `stage_io`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from torch import Tensor

from megatron_ext.runtime.owner import Handler, Owner
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.stage import Backward, RunnableStage
from megatron_ext.runtime.stage_io import StageIO
from megatron_ext.schedule.action import Action, Kind, OverlappedPasses


class PassContext:
    """Contexts in which a feature lets single passes of a step run."""

    def around_forward(
        self, stage: int, microbatch: int, x: Tensor | None
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context in which F of ``stage`` runs with the input ``x``."""
        return contextlib.nullcontext()

    def before_backward(self, action: Action) -> None:
        """Act before the backward pass ``action`` (I, B or W) is recorded and runs."""


class StagePasses(Owner):
    """Owner of the passes of one step, which takes inputs from ``stage_io`` and stores results."""

    def __init__(
        self,
        stages: Mapping[int, RunnableStage],
        stage_io: StageIO,
        recorder: Recorder,
        context: PassContext | None = None,
    ) -> None:
        self._stages = stages
        self._stage_io = stage_io
        self._recorder = recorder
        self._context = context or PassContext()

    def handlers(self) -> Mapping[Kind, Handler]:
        return {
            Kind.FORWARD: self._forward,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.FULL_BACKWARD: self._backward,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
        }

    def forget(self) -> None:
        for stage in self._stages.values():
            stage.forget()

    def _forward(self, action: Action) -> None:
        stage, _, microbatch = action
        x = self._stage_io.input_of(stage, microbatch)
        around = self._context.around_forward(stage, microbatch, x)
        with self._recorder.computing(action), around:
            y = self._stages[stage].forward(microbatch, x)
        self._stage_io.take_output(stage, microbatch, y)

    def _recompute(self, action: Action) -> None:
        with self._recorder.computing(action):
            self._stages[action.stage].recompute(action.microbatch)

    def run_overlapped(self, overlapped: OverlappedPasses) -> None:
        """Run a forward and a backward pass as one.

        No context of a feature is entered: a feature that has one is refused with overlapped
        passes.
        """
        (stage, _, microbatch), backward_action = overlapped
        x = self._stage_io.input_of(stage, microbatch)
        backward = self._begin_backward(backward_action)
        with self._recorder.computing(overlapped):
            y, dx = self._stages[stage].overlapped_forward(microbatch, x, backward)
        self._stage_io.take_output(stage, microbatch, y)
        self._stage_io.take_gradient(backward_action, dx)

    def _backward(self, action: Action) -> None:
        backward = self._begin_backward(action)
        self._context.before_backward(action)
        with self._recorder.computing(action):
            dx = backward.run()
        self._stage_io.take_gradient(action, dx)

    def _begin_backward(self, action: Action) -> Backward:
        stage, kind, microbatch = action
        dy = self._stage_io.gradient_of_output(stage, microbatch)
        return Backward(self._stages[stage], microbatch, dy, kind is Kind.FULL_BACKWARD)

    def _backward_weight(self, action: Action) -> None:
        self._context.before_backward(action)
        with self._recorder.computing(action):
            self._stages[action.stage].backward_weight(action.microbatch)
