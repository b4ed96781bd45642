"""Activations and gradients passed between stages, by a message or on the same rank.

A pass takes its input from the pass before it, which ran on another rank or on this one. Passes
need not know which: the result of a neighbouring stage is stored here until it is used, and freed
as soon as nothing needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from megatron_ext.runtime.owner import Handler, Owner
from megatron_ext.runtime.stage import RunnableStage
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import Neighbour, Placement


class Messages(Protocol):
    """Methods of a transport by which stages send and receive (`messages.transport.Transport`)."""

    rank: int

    def send(self, action: Action, tensor: Tensor) -> None: ...
    def wait_sent(self, send: Action) -> None: ...
    def receive(self, action: Action) -> None: ...
    def received(self, action: Action) -> Tensor: ...
    def drain(self) -> None: ...
    def abandon(self) -> None: ...


class PipelineEnds:
    """Tensors that the first and the last stage exchange with a feature, by overridden methods.

    Without a feature the first stage reads its data, and the last one has the loss.
    """

    def first_input(self, microbatch: int) -> Tensor | None:
        """Return the first stage's input, which gets a gradient; None if the stage reads data."""

    def take_last_output(self, microbatch: int, y: Tensor) -> bool:
        """Take the output of the last stage; return whether the stage no longer needs it."""
        return False

    def last_output_gradient(self, microbatch: int) -> Tensor | None:
        """Return the gradient of the last stage's output; None if the stage has the loss."""

    def take_first_gradient(self, microbatch: int, dx: Tensor | None) -> None:
        """Take the gradient ``dx`` of the first stage's input."""


class StageIO(Owner):
    """Activations and gradients between stages of one step, with sends, receives and waits.

    Attributes:
        outputs: outputs to be passed on, by (stage, microbatch).
        gradients: gradients of inputs to be passed back, by (stage, microbatch).
    """

    def __init__(
        self,
        placement: Placement,
        stages: Mapping[int, RunnableStage],
        transport: Messages,
        ends: PipelineEnds | None = None,
        first_trained_stage: int = 0,
    ) -> None:
        """Initialise the tensors' state.

        ``first_trained_stage`` is the first stage that is not frozen.
        """
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self._placement = placement
        self._stages = stages
        self._transport = transport
        self._ends = ends or PipelineEnds()
        self._first_trained_stage = first_trained_stage

    def handlers(self) -> Mapping[Kind, Handler]:
        return {
            Kind.SEND_F: self._send_output,
            Kind.SEND_B: self._send_gradient,
            Kind.RECV_F: self._transport.receive,
            Kind.RECV_B: self._transport.receive,
            Kind.WAIT_F: self._wait_output,
            Kind.WAIT_B: self._wait_gradient,
        }

    def input_of(self, stage: int, microbatch: int) -> Tensor | None:
        """Return the input of a stage for a forward pass; None on a first stage that reads data.

        The input requires a gradient if an earlier stage is trained.
        """
        before = self._placement.previous(stage)
        if before is None:
            given = self._ends.first_input(microbatch)
            if given is None:
                return None
            x = given
        elif self._placement.is_remote(stage, Neighbour.PREVIOUS):
            x = self._transport.received(Action(stage, Kind.RECV_F, microbatch))
        # The input is the output of a stage on this rank: no copy is made, and the tensor is
        # detached from that stage's autograd graph.
        else:
            x = self.outputs.pop((before, microbatch)).detach()
            self._stages[before].output_sent(microbatch)
        return x.requires_grad_(self._needs_gradient(stage))

    def take_output(self, stage: int, microbatch: int, y: Tensor) -> None:
        if not self._placement.is_last(stage):
            self.outputs[stage, microbatch] = y
        elif self._ends.take_last_output(microbatch, y):
            self._stages[stage].output_sent(microbatch)

    def gradient_of_output(self, stage: int, microbatch: int) -> Tensor | None:
        """Return the gradient of a stage's output; None on a last stage that has the loss."""
        after = self._placement.next(stage)
        if after is None:
            return self._ends.last_output_gradient(microbatch)
        if self._placement.is_remote(stage, Neighbour.NEXT):
            return self._transport.received(Action(stage, Kind.RECV_B, microbatch))
        return self.gradients.pop((after, microbatch))

    def take_gradient(self, action: Action, dx: Tensor | None) -> None:
        """Store ``dx``, the gradient of a stage's input, which the pass ``action`` returned."""
        stage, _, microbatch = action
        if not self._needs_gradient(stage):
            return
        if self._placement.is_first(stage):
            self._ends.take_first_gradient(microbatch, dx)
            return
        assert dx is not None, f"{action} gave no gradient of its input"
        self.gradients[stage, microbatch] = dx

    def _needs_gradient(self, stage: int) -> bool:
        """Return whether the input of ``stage`` needs a gradient.

        It does if an earlier stage, or an embedding before the first stage, is trained.
        """
        return self._first_trained_stage == 0 or stage > self._first_trained_stage

    def forget(self) -> None:
        self._transport.drain()
        self.outputs.clear()

    def finish(self) -> None:
        assert not self.outputs and not self.gradients

    def abandon(self) -> None:
        self._transport.abandon()

    def _send_output(self, action: Action) -> None:
        self._transport.send(action, self.outputs[action.stage, action.microbatch])

    def _send_gradient(self, action: Action) -> None:
        self._transport.send(action, self.gradients[action.stage, action.microbatch])

    def _wait_output(self, action: Action) -> None:
        self._transport.wait_sent(action._replace(kind=Kind.SEND_F))
        del self.outputs[action.stage, action.microbatch]
        self._stages[action.stage].output_sent(action.microbatch)

    def _wait_gradient(self, action: Action) -> None:
        self._transport.wait_sent(action._replace(kind=Kind.SEND_B))
        del self.gradients[action.stage, action.microbatch]
