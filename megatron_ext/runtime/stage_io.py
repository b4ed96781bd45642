"""Activations and gradients passed between stages, by a message or on the same rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from megatron_ext.runtime.owner import Handler, Owner
from megatron_ext.runtime.stage import RunnableStage
from megatron_ext.runtime.vocabulary.vocabulary_passes import VocabularyPasses
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import Neighbour, Placement


class Messages(Protocol):
    """Methods of a transport (`messages.transport.Transport`) that stages need."""

    rank: int

    def send(self, action: Action, tensor: Tensor) -> None: ...
    def wait_sent(self, send: Action) -> None: ...
    def receive(self, action: Action) -> None: ...
    def received(self, action: Action) -> Tensor: ...
    def drain(self) -> None: ...
    def abandon(self) -> None: ...


class StageIO(Owner):
    """Tensors between the passes of one step; owner of sends, receives and their waits.

    Attributes:
        outputs: output of (stage, microbatch), to pass on.
        gradients: gradient of the input of (stage, microbatch), to pass back.
    """

    def __init__(
        self,
        placement: Placement,
        stages: Mapping[int, RunnableStage],
        transport: Messages,
        vocabulary: VocabularyPasses | None,
        first_trained_stage: int = 0,
    ) -> None:
        """With ``vocabulary`` (vocabulary parallelism) its passes run before the first stage and
        after the last. ``first_trained_stage`` is the first stage that is not frozen."""
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self._placement = placement
        self._stages = stages
        self._transport = transport
        self._vocabulary = vocabulary
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
        """Return the input of a stage; None on the first stage without vocabulary parallelism,
        which reads the data. The input requires a gradient if an earlier stage is trained."""
        before = self._placement.previous(stage)
        if before is None:
            if self._vocabulary is None:
                return None
            x = self._vocabulary.embeddings(microbatch)
        elif self._placement.is_remote(stage, Neighbour.PREVIOUS):
            x = self._transport.received(Action(stage, Kind.RECV_F, microbatch))
        else:  # from a stage on this rank: the same memory, detached from that stage's graph
            x = self.outputs.pop((before, microbatch)).detach()
            self._stages[before].output_sent(microbatch)
        return x.requires_grad_(self._needs_gradient(stage))

    def take_output(self, stage: int, microbatch: int, y: Tensor) -> None:
        if not self._placement.is_last(stage):
            self.outputs[stage, microbatch] = y
        elif self._vocabulary is not None:
            self._vocabulary.take_hidden_states(microbatch, y)
            self._stages[stage].output_sent(microbatch)

    def gradient_of_output(self, stage: int, microbatch: int) -> Tensor | None:
        """Return the gradient of a stage's output; None on the last stage without vocabulary
        parallelism, which has the loss."""
        after = self._placement.next(stage)
        if after is None:
            if self._vocabulary is None:
                return None
            return self._vocabulary.hidden_states_gradient(microbatch)
        if self._placement.is_remote(stage, Neighbour.NEXT):
            return self._transport.received(Action(stage, Kind.RECV_B, microbatch))
        return self.gradients.pop((after, microbatch))

    def take_gradient(self, action: Action, dx: Tensor | None) -> None:
        """Store ``dx``, the gradient of its input that the backward pass ``action`` returned."""
        stage, _, microbatch = action
        is_first = self._placement.is_first(stage)
        if (is_first and self._vocabulary is None) or not self._needs_gradient(stage):
            return
        assert dx is not None, f"{action} gave no gradient of its input"
        if not is_first:
            self.gradients[stage, microbatch] = dx
        elif self._vocabulary is not None:
            self._vocabulary.take_embedding_gradient(microbatch, dx)

    def _needs_gradient(self, stage: int) -> bool:
        """Whether a stage before ``stage``, or a vocabulary-parallel embedding, is trained."""
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
