"""Optimizer steps on `LinearStage`s: with post-validation, and in one process without it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_ext.features.post_validation.runtime.actions import Validation
from megatron_ext.features.post_validation.runtime.messages import ValidationMessages
from megatron_ext.features.post_validation.runtime.partial_state import PartialState
from megatron_ext.schedule.placement import Placement
from tests.helpers.stages import LinearStage, Pipeline, add_gradients, stages_alone

RATE = 0.1


@dataclass(frozen=True)
class Course:
    """Course of some optimizer steps. A bad step is one that is clipped or skipped. Ranks pass
    their partial norms on along a chain, from the rank of the first stage to that of the last.

    Attributes:
        steps: number of steps.
        clips: by step, the position in the chain at which the partial norm becomes too large.
        overflows: by step, the position in the chain of the rank with an inf among its gradients.
    """

    steps: int
    clips: Mapping[int, int] = field(default_factory=dict)
    overflows: Mapping[int, int] = field(default_factory=dict)

    def is_bad(self, step: int) -> bool:
        return step in self.clips or step in self.overflows


def own_state(
    stages: Iterable[LinearStage], step: int, position: int, course: Course
) -> PartialState:
    """Return the part of the norm, and whether there are infs, on the rank at ``position`` of the
    chain. ``stages`` are that rank's stages."""
    gradients = [gradient for stage in stages for gradient in stage.gradients]
    squared_norm = sum(float(gradient.double().square().sum()) for gradient in gradients)
    return PartialState(squared_norm, course.overflows.get(step) == position)


def is_quiet(state: PartialState, limit: float) -> bool:
    return not state.found_inf and state.squared_norm <= limit**2


def update(stages: Iterable[LinearStage], state: PartialState, limit: float) -> None:
    """Run the step of an optimizer that knows the state of all ranks: the step is clipped if the
    norm is above ``limit``, and skipped if a gradient is infinite."""
    if state.found_inf:
        return
    factor = 1.0 if is_quiet(state, limit) else limit / math.sqrt(state.squared_norm)
    with torch.no_grad():
        for parameter in parameters(stages):
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=RATE * factor)


def parameters(stages: Iterable[LinearStage]) -> list[torch.nn.Parameter]:
    return [parameter for stage in stages for parameter in (stage.weight, stage.bias)]


def clear_gradients(stages: Iterable[LinearStage]) -> None:
    for parameter in parameters(stages):
        parameter.grad = None


def read_data_of(stages: Iterable[LinearStage], data: int, step: int) -> None:
    """Give each step its own data."""
    for stage in stages:
        stage.data = 100 * data + step


def chain_of(placement: Placement) -> list[int]:
    """Return the ranks in the order of their first stages."""
    return sorted(range(placement.ranks), key=lambda rank: placement.stages_of[rank])


@dataclass
class Synchronous:
    """Results of the same steps in one process, which checks norm and infs of each step before it
    updates.

    Attributes:
        stages: the stages after the last step.
        losses: by step and microbatch.
        states: by step and position of the chain, the state that is passed on.
        limits: limit of the norm, by step, as the course requires.
    """

    stages: list[LinearStage]
    losses: list[dict[int, Tensor]] = field(default_factory=list)
    states: list[list[PartialState]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)


def synchronously(pipeline: Pipeline, course: Course) -> Synchronous:
    stages = stages_alone(pipeline)
    done = Synchronous(stages)
    placement = pipeline.program.schedule.placement
    for step in range(course.steps):
        read_data_of(stages, pipeline.data, step)
        add_gradients(stages, pipeline.program)
        done.losses.append(dict(stages[-1].losses))
        states: list[PartialState] = []
        for position, rank in enumerate(chain_of(placement)):
            mine = [stages[number] for number in placement.stages_of[rank]]
            own = own_state(mine, step, position, course)
            states.append(states[-1].plus(own) if states else PartialState().plus(own))
        norms = [0.0, *(math.sqrt(state.squared_norm) for state in states)]
        clipped_at = course.clips.get(step)
        limit = 10 * norms[-1]
        if clipped_at is not None:
            limit = (norms[clipped_at] + norms[clipped_at + 1]) / 2
        update(stages, states[-1], limit)
        clear_gradients(stages)
        done.states.append(states)
        done.limits.append(limit)
    return done


class StepAtOnce(Validation):
    """`Validation` of an optimizer that steps with the state that it knows, and takes the step back
    if that was wrong."""

    def __init__(self, pipeline: Pipeline, course: Course, limits: list[float]) -> None:
        placement = pipeline.program.schedule.placement
        self.messages = ValidationMessages(pipeline.group, placement, pipeline.recorder)
        self.stages = list(pipeline.stages.values())
        self.course = course
        self.limits = limits
        self.position = chain_of(placement).index(pipeline.group.rank())
        self.step = 0
        # States that this rank has passed on, one for each step.
        self.states: list[PartialState] = []
        self.taken_back: list[int] = []  # numbers of the steps that were rolled back
        self._kept: list[Tensor] | None = None

    def optimizer_step(self) -> None:
        own = own_state(self.stages, self.step, self.position, self.course)
        state = self.messages.partial().plus(own)
        self.states.append(state)
        self.messages.pass_on(state)
        if is_quiet(state, self.limits[self.step]):
            self._kept = [parameter.detach().clone() for parameter in parameters(self.stages)]
            update(self.stages, state, self.limits[self.step])

    def expect(self) -> None:
        self.messages.expect()

    def commit_or_rollback(self) -> bool:
        if not self.messages.is_pending:
            return True
        state = self.messages.verdict()
        stands = is_quiet(state, self.limits[self.step])
        if not stands:
            self.redo(state)
        self._kept = None
        clear_gradients(self.stages)
        self.step += 1
        return stands

    def redo(self, state: PartialState) -> None:
        if self._kept is not None:
            self.taken_back.append(self.step)
            with torch.no_grad():
                for parameter, kept in zip(parameters(self.stages), self._kept, strict=True):
                    parameter.copy_(kept)
        update(self.stages, state, self.limits[self.step])

    def abandon(self) -> None:
        self.messages.abandon()
