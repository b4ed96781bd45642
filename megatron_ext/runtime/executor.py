"""Run a rank's part of a program: one loop, one handler a kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.stage import Stage
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import GRADIENT_DUTIES, RULES
from megatron_ext.schedule.schedule import is_compute
from megatron_ext.schedule.verify import Program


class Messages(Protocol):
    """What the executor needs of a transport (`transport.Transport`)."""

    rank: int

    def send(self, action: Action, tensor: Tensor) -> None: ...
    def wait_sent(self, send: Action) -> None: ...
    def receive(self, action: Action) -> None: ...
    def received(self, action: Action) -> Tensor: ...
    def abandon(self) -> None: ...


def execute(
    program: Program, stages: Mapping[int, Stage], transport: Messages, recorder: Recorder
) -> None:
    """Run one step of ``program`` on this rank.

    Args:
        program: proved; the same on every rank.
        stages: the stages of this rank, by number.
        transport: the step's messages.
        recorder: told what runs.

    Raises:
        PeerFailure: another rank has failed. Exceptions of a stage pass through, with a note that
            names the action. Either way the channels are closed, so that all ranks fail.
    """
    _Execution(program, stages, transport, recorder).run()


class _Execution:
    """The tensors between the passes of one step."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        transport: Messages,
        recorder: Recorder,
    ) -> None:
        self.row = program.schedule.rows[transport.rank]
        self.placement = program.schedule.placement
        self.microbatches = program.problem.microbatches
        self.stages = stages
        self.transport = transport
        self.recorder = recorder
        self.outputs: dict[tuple[int, int], Tensor] = {}  # of (stage, microbatch), to pass on
        self.gradients: dict[tuple[int, int], Tensor] = {}  # of its input, to pass back
        self.last_gradient = {
            action.stage: action
            for action in self.row
            if not GRADIENT_DUTIES.isdisjoint(RULES[action.kind].covers)
        }

    def run(self) -> None:
        for action in self.row:
            try:
                self.perform(action)
                if is_compute(action) and self.last_gradient.get(action.stage) == action:
                    self.stages[action.stage].gradients_complete()
            except BaseException as error:
                error.add_note(f"megatron_ext: pipeline rank {self.transport.rank}, in {action}")
                if isinstance(error, StopIteration):
                    error.add_note(
                        f"megatron_ext: the data iterator has ended; a step of "
                        f"{self.microbatches} microbatches takes as many items"
                    )
                self.transport.abandon()
                raise
        assert not self.outputs and not self.gradients

    def perform(self, action: Action) -> None:
        _HANDLERS[action.kind](self, action)

    def forward(self, action: Action) -> None:
        stage, _, microbatch = action
        x = self.input_of(stage, microbatch)
        with self.recorder.computing(action):
            y = self.stages[stage].forward(microbatch, x)
        if self.placement.is_remote(stage, +1) is not None:
            self.outputs[stage, microbatch] = y

    def backward(self, action: Action) -> None:
        stage, kind, microbatch = action
        dy = self.gradient_of_output(stage, microbatch)
        whole = kind is Kind.FULL_BACKWARD
        run = self.stages[stage].backward if whole else self.stages[stage].backward_input
        with self.recorder.computing(action):
            dx = run(microbatch, dy)
        if self.placement.is_remote(stage, -1) is not None:
            assert dx is not None, f"{action} gave no gradient of its input"
            self.gradients[stage, microbatch] = dx

    def backward_weight(self, action: Action) -> None:
        with self.recorder.computing(action):
            self.stages[action.stage].backward_weight(action.microbatch)

    def send_output(self, action: Action) -> None:
        self.transport.send(action, self.outputs[action.stage, action.microbatch])

    def send_gradient(self, action: Action) -> None:
        self.transport.send(action, self.gradients[action.stage, action.microbatch])

    def receive(self, action: Action) -> None:
        self.transport.receive(action)

    def input_of(self, stage: int, microbatch: int) -> Tensor | None:
        remote = self.placement.is_remote(stage, -1)
        if remote is None:
            return None
        if remote:
            x = self.transport.received(Action(stage, Kind.RECV_F, microbatch))
        else:  # handed over on this rank: the same memory, cut off from the graph that made it
            x = self.outputs.pop((stage - 1, microbatch)).detach()
            self.stages[stage - 1].output_sent(microbatch)
        return x.requires_grad_()

    def gradient_of_output(self, stage: int, microbatch: int) -> Tensor | None:
        remote = self.placement.is_remote(stage, +1)
        if remote is None:
            return None
        if remote:
            return self.transport.received(Action(stage, Kind.RECV_B, microbatch))
        return self.gradients.pop((stage + 1, microbatch))

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
}
