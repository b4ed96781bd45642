"""Hooks by which a feature takes part in a training, as `step_hooks` are those of a step.

A training has moments at which a feature may have something to say: settings are checked, programs
are made, ranks connect, a step begins or ends. Code at these moments names no feature; it calls the
methods here, which do nothing unless a feature overrides them.
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
    """Raised for a program that this rank cannot run, although it is proved."""


class TrainingHooks:
    """Hooks of one feature in one training, made at the first step that has the feature.

    Attributes:
        trains_first_stage: whether the first stage has backward passes although its chunk may have
            no trained parameter.
        needs_callers_hooks: whether steps have to know the hooks that the caller has put on
            parameters, also where no backward pass is split.
    """

    trains_first_stage = False
    needs_callers_hooks = False

    def __init__(self, config: PipelineConfig, programs: Programs) -> None:
        self._config = config
        self._programs = programs

    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        """Return whether a training with ``ours``, our settings, has the feature. ``settings`` are
        Megatron's arguments, or its config of the model."""
        raise NotImplementedError

    @classmethod
    def complete_arguments(cls, args: Any, ours: PipelineConfig) -> None:
        """Set what the feature needs in Megatron's validated ``args``.

        Raises:
            ValueError: they do not go with the feature.
        """

    @classmethod
    def check_arguments(cls, args: Any, ours: PipelineConfig) -> None:
        """Refuse Megatron's validated ``args`` that do not go with the feature, as far as no
        program is needed to tell."""

    @classmethod
    def check_microbatches(cls, args: Any, ours: PipelineConfig) -> None:
        """Refuse Megatron's validated ``args`` whose data do not go with the feature. Callers that
        have a config of their own give the arguments about data only."""

    @classmethod
    def check_files(cls, ours: PipelineConfig) -> None:
        """Refuse files that the feature reads in a launch, and that a plan does not need."""

    @classmethod
    def remarks(cls, args: Any) -> Sequence[LaunchRemark]:
        """Return what a user should know who launches with Megatron's validated ``args``."""
        return ()

    @classmethod
    def check_program(cls, args: Any, program: Program) -> None:
        """Refuse a ``program`` that does not go with the feature in a training with Megatron's
        ``args``."""

    @classmethod
    def other_programs(
        cls, args: Any, ours: PipelineConfig, make: Callable[[ResolvedSpec], list[Program]]
    ) -> Mapping[str, list[Program]]:
        """Return programs that ``make`` builds of schedules under which steps of a launch may run
        in addition to that of ``ours``, by schedule; the first of each is of the largest step.

        Raises:
            ValueError: there is none for Megatron's ``args``, or it would change the results.
        """
        return {}

    @classmethod
    def requested_options(cls, settings: Any, microbatches: int | None) -> Mapping[str, Any]:
        """Return options of a schedule that ``settings``, Megatron's arguments or a config, request
        for a step of so many ``microbatches``; if that is None, for all steps of a launch."""
        return {}

    def observers(self) -> Sequence[StepObserver[Step]]:
        """Return the feature's observers of training steps."""
        return ()

    @classmethod
    def stock_observers(cls, ours: PipelineConfig) -> Sequence[StepObserver[ObservedStep]]:
        """Return the feature's observers of training steps that Megatron's own functions run under
        ``ours``, our settings."""
        return ()

    def check_call(self, call: Call) -> None:
        """Refuse a call of Megatron's schedule function that does not go with the feature."""

    def check_models(self, call: Call) -> None:
        """Refuse models of ``call`` that do not go with the feature; they are used for the first
        time. Collective over the pipeline."""

    def check_new_program(self, call: Call) -> None:
        """Refuse a ``call`` that does not go with the feature before a program is made for it."""

    def before_evaluation(self) -> None:
        """Hook that runs before an evaluation begins."""

    def choose_schedule(
        self,
        call: Call,
        shape: BatchShape,
        make: Callable[[], Program],
        connections: Connections | None,
    ) -> None:
        """Select the schedule of the training step that begins now, whose costs are known.

        ``make`` builds its program, which ``connections`` then prepares for; None before the first
        step. Collective over the world at steps that all ranks know.
        """

    def connect(self, call: Call, program: Program, connections: Connections) -> None:
        """Connect ranks for the feature, before the first step. Collective over the pipeline."""

    def expect(self, program: Program, connections: Connections) -> None:
        """Prepare the feature for steps of ``program``.

        Raises:
            CannotRun: this rank cannot run it.
        """

    def log_lines(self, call: Call) -> Sequence[str]:
        """Return the feature's lines for the log when a new program is trained."""
        return ()

    def begin(self, call: Call, program: Program, connections: Connections) -> StepHooks | None:
        """Return the hooks of a step that begins now; None if the feature has no part in it."""
        return None

    def interrupt(self) -> None:
        """Note that other work takes place between two steps and belongs to neither."""

    def end(self) -> None:
        """Release all that the feature has: the process groups of the training are gone."""
