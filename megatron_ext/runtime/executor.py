"""Run a rank's part of a program: one loop, one handler a kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from megatron_ext.runtime.host.offload import OffloadedStep
from megatron_ext.runtime.messages.transport import PeerFailure
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.stage import Stage
from megatron_ext.runtime.vocabulary.passes import VocabularyPasses
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.placement import Neighbour
from megatron_ext.schedule.program.verify import Program
from megatron_ext.schedule.schedule import is_compute


class Messages(Protocol):
    """What the executor needs of a transport (`transport.Transport`)."""

    rank: int

    def send(self, action: Action, tensor: Tensor) -> None: ...
    def wait_sent(self, send: Action) -> None: ...
    def receive(self, action: Action) -> None: ...
    def received(self, action: Action) -> Tensor: ...
    def drop(self) -> None: ...
    def abandon(self) -> None: ...


class Validation(Protocol):
    """What the executor needs of post-validation, of a program that has it."""

    def expect(self) -> None:
        """The verdict on the last step may come from now on; it is passed back as it comes."""

    def settle(self) -> bool:
        """Whether that step stands, when its verdict has come.

        If not, it has been taken back and done as it should be, and so have random states and data
        of the step that runs: it begins again.
        """
        ...

    def abandon(self) -> None: ...


def execute(
    program: Program,
    stages: Mapping[int, Stage],
    transport: Messages,
    recorder: Recorder,
    vocabulary: VocabularyPasses | None = None,
    offload: OffloadedStep | None = None,
    validation: Validation | None = None,
) -> None:
    """Run one step of ``program`` on this rank, but for the optimizer's.

    Args:
        program: proved; the same on every rank.
        stages: the stages of this rank, by number.
        transport: the step's messages.
        recorder: told what runs.
        vocabulary: the step's, of a program with vocabulary parallelism.
        offload: the step's, of a program in which activations leave for the host.
        validation: of the step before, of a program with post-validation.

    Raises:
        PeerFailure: another rank has failed. Exceptions of a stage pass through, with a note that
            names the action. Either way the channels are closed, so that all ranks fail.
    """
    _Execution(program, stages, transport, recorder, vocabulary, offload, validation).run()


class _Execution:
    """The tensors between the passes of one step."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        transport: Messages,
        recorder: Recorder,
        vocabulary: VocabularyPasses | None = None,
        offload: OffloadedStep | None = None,
        validation: Validation | None = None,
    ) -> None:
        self.row = program.schedule.rows[transport.rank]
        self.placement = program.schedule.placement
        self.microbatches = program.problem.microbatches
        self.stages = stages
        self.transport = transport
        self.recorder = recorder
        self.vocabulary = vocabulary
        self.offload = offload
        self.validation = validation
        self.stands = True  # what has run of this step so far
        self.action = self.row[0]  # that it is at
        self.outputs: dict[tuple[int, int], Tensor] = {}  # of (stage, microbatch), to pass on
        self.gradients: dict[tuple[int, int], Tensor] = {}  # of its input, to pass back
        self.last_gradient = {
            action.stage: action for action in self.row if RULES[action.kind].adds_to_gradients
        }

    def run(self) -> None:
        self.recorder.in_step = True
        try:
            self.run_row()
            if not self.stands:
                self.stands = True
                self.run_row()
            if self.vocabulary is not None:
                self.vocabulary.finish()
            if self.offload is not None:
                self.offload.finish()
            assert not self.outputs and not self.gradients
            # In this order: an interruption comes before the step's end, or finds it at its end.
            self.recorder.in_step = False
            self.check_others()
        except BaseException as error:
            self.recorder.in_step = False
            self.recorder.failed(error, self.action)
            if isinstance(error, StopIteration):
                error.add_note(
                    f"megatron_ext: the data iterator has ended; a step of "
                    f"{self.microbatches} microbatches takes as many items"
                )
            self.abandon()
            raise

    def run_row(self) -> None:
        """The actions in order, up to one after which what has run does not stand."""
        for action in self.row:
            self.action = action
            self.check_others()
            self.perform(action)
            if not self.stands:
                return
            if is_compute(action) and self.last_gradient.get(action.stage) == action:
                self.stages[action.stage].gradients_complete()

    def check_others(self) -> None:
        """Raise if another rank has failed: what has come since may be anything."""
        if self.recorder.interruption is not None:
            raise PeerFailure(
                f"pipeline rank {self.transport.rank} was at {self.action} when another rank had "
                f"failed: {self.recorder.interruption}"
            )

    def forget(self) -> None:
        """Drop what has run: the step begins again."""
        self.transport.drop()
        self.outputs.clear()
        for stage in self.stages.values():
            stage.forget()
        self.recorder.forget()

    def abandon(self) -> None:
        self.transport.abandon()
        if self.vocabulary is not None:
            self.vocabulary.abandon()
        if self.offload is not None:
            self.offload.abandon()
        if self.validation is not None:
            self.validation.abandon()

    def perform(self, action: Action) -> None:
        handler = _HANDLERS.get(action.kind)
        if handler is not None:
            handler(self, action)
        else:
            assert self.vocabulary is not None, f"{action} without a vocabulary"
            self.vocabulary.perform(action)

    def forward(self, action: Action) -> None:
        stage, _, microbatch = action
        x = self.input_of(stage, microbatch)
        with self.recorder.computing(action), self.saving(stage, microbatch, x):
            y = self.stages[stage].forward(microbatch, x)
        if not self.placement.is_last(stage):
            self.outputs[stage, microbatch] = y
        elif self.vocabulary is not None:
            self.vocabulary.take_hidden_states(microbatch, y)
            self.stages[stage].output_sent(microbatch)

    def backward(self, action: Action) -> None:
        stage, kind, microbatch = action
        dy = self.gradient_of_output(stage, microbatch)
        self.await_reload(action)
        whole = kind is Kind.FULL_BACKWARD
        run = self.stages[stage].backward if whole else self.stages[stage].backward_input
        with self.recorder.computing(action):
            dx = run(microbatch, dy)
        is_first = self.placement.is_first(stage)
        if is_first and self.vocabulary is None:
            return
        assert dx is not None, f"{action} gave no gradient of its input"
        if not is_first:
            self.gradients[stage, microbatch] = dx
        elif self.vocabulary is not None:
            self.vocabulary.take_embedding_gradient(microbatch, dx)

    def backward_weight(self, action: Action) -> None:
        self.await_reload(action)
        with self.recorder.computing(action):
            self.stages[action.stage].backward_weight(action.microbatch)

    def send_output(self, action: Action) -> None:
        self.transport.send(action, self.outputs[action.stage, action.microbatch])

    def send_gradient(self, action: Action) -> None:
        self.transport.send(action, self.gradients[action.stage, action.microbatch])

    def receive(self, action: Action) -> None:
        self.transport.receive(action)

    def input_of(self, stage: int, microbatch: int) -> Tensor | None:
        previous = self.placement.previous(stage)
        if previous is None:
            if self.vocabulary is None:
                return None
            x = self.vocabulary.embeddings(microbatch)
        elif self.placement.is_remote(stage, Neighbour.PREVIOUS):
            x = self.transport.received(Action(stage, Kind.RECV_F, microbatch))
        else:  # handed over on this rank: the same memory, cut off from the graph that made it
            x = self.outputs.pop((previous, microbatch)).detach()
            self.stages[previous].output_sent(microbatch)
        return x.requires_grad_()

    def gradient_of_output(self, stage: int, microbatch: int) -> Tensor | None:
        after = self.placement.next(stage)
        if after is None:
            if self.vocabulary is None:
                return None
            return self.vocabulary.hidden_states_gradient(microbatch)
        if self.placement.is_remote(stage, Neighbour.NEXT):
            return self.transport.received(Action(stage, Kind.RECV_B, microbatch))
        return self.gradients.pop((after, microbatch))

    def saving(
        self, stage: int, microbatch: int, x: Tensor | None
    ) -> contextlib.AbstractContextManager[None]:
        if self.offload is None:
            return contextlib.nullcontext()
        return self.offload.saving(stage, microbatch, x)

    def await_reload(self, action: Action) -> None:
        if self.offload is not None:
            self.offload.await_reload(action)

    def move(self, action: Action) -> None:
        assert self.offload is not None, f"{action} without offload"
        self.offload.perform(action)

    def expect_verdict(self, action: Action) -> None:
        assert self.validation is not None, f"{action} without post-validation"
        self.validation.expect()

    def settle(self, action: Action) -> None:
        assert self.validation is not None, f"{action} without post-validation"
        self.stands = self.validation.settle()
        if not self.stands:
            self.forget()

    def leave_to_optimizer(self, action: Action) -> None:
        """What follows the passes happens when the optimizer is asked to step."""

    def wait_output(self, action: Action) -> None:
        self.transport.wait_sent(action._replace(kind=Kind.SEND_F))
        del self.outputs[action.stage, action.microbatch]
        self.stages[action.stage].output_sent(action.microbatch)

    def wait_gradient(self, action: Action) -> None:
        self.transport.wait_sent(action._replace(kind=Kind.SEND_B))
        del self.gradients[action.stage, action.microbatch]


# Of the class: in an object, its own bound methods would be a cycle of references, which keeps the
# step's stages, and through them Megatron's data loaders, until Python collects garbage.
_HANDLERS: Mapping[Kind, Callable[[_Execution, Action], None]] = {
    Kind.FORWARD: _Execution.forward,
    Kind.BACKWARD_INPUT: _Execution.backward,
    Kind.FULL_BACKWARD: _Execution.backward,
    Kind.BACKWARD_WEIGHT: _Execution.backward_weight,
    Kind.SEND_F: _Execution.send_output,
    Kind.SEND_B: _Execution.send_gradient,
    Kind.RECV_F: _Execution.receive,
    Kind.RECV_B: _Execution.receive,
    Kind.WAIT_F: _Execution.wait_output,
    Kind.WAIT_B: _Execution.wait_gradient,
    Kind.OFFLOAD_F: _Execution.move,
    Kind.FREE_F: _Execution.move,
    Kind.RELOAD_F: _Execution.move,
    Kind.OFFLOAD_I: _Execution.move,
    Kind.FREE_I: _Execution.move,
    Kind.RELOAD_I: _Execution.move,
    Kind.RECV_V: _Execution.expect_verdict,
    Kind.SEND_V: _Execution.expect_verdict,
    Kind.SETTLE: _Execution.settle,
    Kind.RECV_P: _Execution.leave_to_optimizer,
    Kind.STEP: _Execution.leave_to_optimizer,
    Kind.SEND_P: _Execution.leave_to_optimizer,
}
