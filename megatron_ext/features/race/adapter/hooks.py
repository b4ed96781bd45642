"""Hooks of a race of schedules.

In a race the schedule changes from turn to turn, so the programs of all contestants are made before
the training, and one of them is chosen when a step begins. Work between two steps, such as a save,
interrupts a turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

from megatron_ext.adapter.compatibility import refuse_order
from megatron_ext.adapter.observers.observer import Step, StepObserver
from megatron_ext.adapter.programs import BatchShape, Programs
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.connections import Connections
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.adapter.transformer_engine.captured import GRAPHS, captures
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.config import PipelineConfig, flag
from megatron_ext.features.race.adapter.step_race import StepRace
from megatron_ext.features.race.refusals import RACE_REFUSALS
from megatron_ext.race.eligibility import check_microbatch_order
from megatron_ext.runtime.interruption import heard_if_it_fails


class RaceHooks(TrainingHooks):
    """Hooks that choose the schedule of each training step during a race of schedules."""

    def __init__(self, config: PipelineConfig, programs: Programs) -> None:
        super().__init__(config, programs)
        self._race = StepRace(config, programs)

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return RACE_REFUSALS.may_be_on(ours)

    @override
    @classmethod
    def check_arguments(cls, args: Any, ours: PipelineConfig) -> None:
        if captures(args):
            raise ValueError(
                f"{flag('race')} does not go with {GRAPHS}: graphs are captured in the order of "
                f"one schedule; race without graphs, then train with graphs under the winner"
            )

    @override
    @classmethod
    def other_programs(
        cls, args: Any, ours: PipelineConfig, make: Callable[[ResolvedSpec], list[Program]]
    ) -> Mapping[str, list[Program]]:
        made: dict[str, list[Program]] = {}
        for resolved in ours.resolved_specs[1:]:
            try:
                made[resolved.spec] = make(resolved)
                for program in made[resolved.spec]:
                    refuse_order(args, program.schedule)
                    check_microbatch_order(program)
            except ValueError as error:
                raise ValueError(f"{flag('race')}: {resolved.spec} cannot race: {error}") from error
        return made

    @override
    def observers(self) -> Sequence[StepObserver[Step]]:
        return [self._race]

    @override
    def choose_schedule(
        self,
        call: Call,
        shape: BatchShape,
        make: Callable[[], Program],
        connections: Connections | None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            if connections is not None:
                stack.enter_context(heard_if_it_fails(connections.recorder, "the race"))
            self._race.choose(call, shape, make, connections)

    @override
    def interrupt(self) -> None:
        self._race.interrupt()
