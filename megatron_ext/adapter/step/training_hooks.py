"""Hooks by which a feature takes part in a training, as `step_hooks` are those of a step.

A feature may act when settings are checked, when programs are made, when ranks connect, and when a
step begins or ends. The code for these events names no feature; it calls the methods here, which do
nothing unless a feature overrides them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_ext.adapter.observers.observer import ObservedStep, Step, StepObserver
from megatron_ext.adapter.programs import BatchShape, Programs
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.connections import Connections
from megatron_ext.adapter.step.step_hooks import StepHooks
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.config import PipelineConfig
from megatron_ext.observe.launch_remark import LaunchRemark


class CannotRun(ValueError):
    """Error: this rank cannot run a program, although the program is proved valid."""


class TrainingHooks:
    """Hooks of one feature in a training, created at the first step with the feature.

    Attributes:
        trains_first_stage: whether the first stage has backward passes although its chunk may have
            no trained parameter.
        needs_callers_hooks: whether steps have to know the hooks that the caller has put on
            parameters, even if no backward pass is split.
        limits_host: whether the feature allows the host to wait for its device between passes, and
            to query the device's events.
    """

    trains_first_stage = False
    needs_callers_hooks = False
    limits_host = True

    def __init__(self, config: PipelineConfig, programs: Programs) -> None:
        self._config = config
        self._programs = programs

    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        """Return whether a training with these settings has the feature.

        ``ours`` are the settings of megatron_ext; ``settings`` are Megatron's arguments, or its
        config of the model.
        """
        raise NotImplementedError

    @classmethod
    def complete_arguments(cls, args: Any, ours: PipelineConfig) -> str | None:
        """Set the values that the feature needs in Megatron's validated ``args``.

        Returns:
            What the log of a training says of the change; None if nothing is to be said.

        Raises:
            ValueError: ``args`` do not work with the feature.
        """
        return None

    @classmethod
    def check_arguments(cls, args: Any, ours: PipelineConfig) -> None:
        """Refuse Megatron's validated ``args`` that conflict with the feature.

        Called before any program is made.
        """

    @classmethod
    def check_microbatches(cls, args: Any, ours: PipelineConfig) -> None:
        """Refuse Megatron's validated ``args`` whose training data do not work with the feature.

        Callers with a config of their own give only the arguments about data.
        """

    @classmethod
    def check_files(cls, ours: PipelineConfig) -> None:
        """Refuse unreadable files that the feature needs in a launch; a plan does not call this."""

    @classmethod
    def remarks(cls, args: Any) -> Sequence[LaunchRemark]:
        """Return remarks of this feature for a user who launches with validated ``args``."""
        return ()

    @classmethod
    def check_program(cls, args: Any, program: Program) -> None:
        """Refuse a ``program`` that does not work with the feature under Megatron's ``args``."""

    @classmethod
    def other_programs(
        cls, args: Any, ours: PipelineConfig, make: Callable[[ResolvedSpec], list[Program]]
    ) -> Mapping[str, list[Program]]:
        """Return programs of further schedules under which steps of a launch may run, by schedule.

        ``make`` builds them. The first program of each schedule is that of the largest step.

        Raises:
            ValueError: a schedule has no program for Megatron's ``args``, or would change the
                results.
        """
        return {}

    @classmethod
    def requested_options(cls, settings: Any, microbatches: int | None) -> Mapping[str, Any]:
        """Return the schedule options that Megatron's ``settings`` request, by name.

        They are options of this feature. ``settings`` are Megatron's arguments or a config.
        ``microbatches`` is the number in the step; None stands for all steps of a launch.
        """
        return {}

    def observers(self) -> Sequence[StepObserver[Step]]:
        """Return the feature's observers of training steps that our runtime runs."""
        return ()

    @classmethod
    def stock_observers(cls, ours: PipelineConfig) -> Sequence[StepObserver[ObservedStep]]:
        """Return the feature's observers of training steps that Megatron's own functions run.

        ``ours`` are the settings of megatron_ext.
        """
        return ()

    def check_call(self, call: Call) -> None:
        """Refuse a call of Megatron's schedule function that does not work with the feature."""

    def check_models(self, call: Call) -> None:
        """Refuse models of ``call`` that do not work with the feature, when they are first used.

        Collective over the pipeline.
        """

    def check_new_program(self, call: Call) -> None:
        """Refuse a ``call`` that does not work with the feature before a program is made for it."""

    def before_evaluation(self) -> None:
        """Called before an evaluation begins."""

    def choose_schedule(
        self,
        call: Call,
        shape: BatchShape,
        make: Callable[[], Program],
        connections: Connections | None,
    ) -> None:
        """Select the schedule of the training step that begins now, whose costs are known.

        ``make`` builds the schedule's program. ``connections`` are the rank's connections to other
        ranks; None before the first step. Collective over the world at steps that all ranks know.
        """

    def connect(self, call: Call, program: Program, connections: Connections) -> None:
        """Connect ranks for the feature's communication, before the first step.

        Collective over the pipeline.
        """

    def expect(self, program: Program, connections: Connections) -> None:
        """Prepare the feature for steps of ``program``.

        Raises:
            CannotRun: this rank cannot run the program.
        """

    def log_lines(self, call: Call) -> Sequence[str]:
        """Return lines for the log that the feature adds when a new program is trained."""
        return ()

    def begin(self, call: Call, program: Program, connections: Connections) -> StepHooks | None:
        """Return the feature's hooks for a step that begins now.

        Return None if it has no part in the step.
        """
        return None

    def interrupt(self) -> None:
        """Note that other work, such as a checkpoint save, takes place between two steps."""

    def end(self) -> None:
        """Release all that the feature holds, because the training's process groups are gone."""
