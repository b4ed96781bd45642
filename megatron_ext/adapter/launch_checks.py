"""Checks of a launch, in the one order in which the launch, doctor and plan run them.

A launch runs them on every rank, before any process group exists, and ends with the first refusal.
Doctor notes all refusals, and plan ends with the first. Megatron itself checks more settings later,
when it sets up the model and the training. Doctor and plan check those after the checks here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from megatron_ext.adapter.arguments import (
    Prove,
    add_virtual_stages,
    check_features,
    check_microbatches,
    check_parsed_arguments,
    other_programs,
)
from megatron_ext.adapter.handled_settings.settings import apply_handled_settings
from megatron_ext.adapter.impossible_sizes import refuse_counts, refuse_sizes
from megatron_ext.adapter.layers import layers_of_stages
from megatron_ext.adapter.layout_arguments import CHUNKS
from megatron_ext.adapter.step_sizes import count_microbatches
from megatron_ext.base.words import counted
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig
from megatron_ext.schedule.placement import line, loop


class Attempt(Protocol):
    """Function that runs one check of a launch command, about ``subject``, and returns its result.

    ``fix`` says what to do if the check refuses with a ValueError. ``right`` puts the result into
    words; an empty text is not reported.
    """

    def __call__[T](
        self,
        subject: str,
        work: Callable[[], T],
        fix: str = "",
        right: Callable[[T], str] | None = None,
    ) -> T | None: ...


def raising[T](
    subject: str, work: Callable[[], T], fix: str = "", right: Callable[[T], str] | None = None
) -> T | None:
    """Run one check of a launch command. A refusal is raised, so that it ends all checks."""
    return work()


def validated(
    args: Any, config: PipelineConfig, validate: Callable[[Any], Any], *, tells: bool = False
) -> Any:
    """Return Megatron's ``args``, validated, with the schedule's virtual stages.

    Settings that the schedule implements itself are switched off, and logged if ``tells``.

    Args:
        validate: Megatron's own validation, which completes the arguments.

    Raises:
        ValueError: sizes are impossible, or cannot be split over the schedule's stages.
        AssertionError: Megatron refuses the arguments.
    """
    refuse_counts(args)
    if config.schedule is not None:
        add_virtual_stages(args, config)
    try:
        args = validate(args)
    except AssertionError as error:
        if "divisible" in str(error):
            _suggest_layout(args, config)
        raise
    refuse_sizes(args)
    if config.schedule is not None:
        apply_handled_settings(args, config, tells=tells)
    return args


def _suggest_layout(args: Any, config: PipelineConfig) -> None:
    """Raise ValueError that suggests a layout if layers do not split evenly over stages.

    Called after Megatron has refused the arguments.
    """
    ranks, chunks = args.pipeline_model_parallel_size, getattr(args, CHUNKS) or 1
    placement = loop(ranks, vpp=chunks) if chunks > 1 else line(ranks)
    if config.schedule is not None:
        placement = config.resolved_spec.place(ranks)
    if args.num_layers is not None:
        layers_of_stages(args, placement)


def check_batches(
    args: Any,
    config: PipelineConfig,
    settle_vocabulary: Callable[[], object],
    attempt: Attempt = raising,
    check_recipe: Callable[[], object] | None = None,
    tokenizer: Callable[[object], str] | None = None,
) -> bool:
    """Check vocabulary and microbatches, and return whether the number of microbatches is known.

    Args:
        args: Megatron's validated arguments.
        settle_vocabulary: pads the vocabulary as ``config`` requires.
        check_recipe: checks the config of Megatron-Bridge that ``args`` were read from; None for a
            launch command.
        tokenizer: puts the result of ``settle_vocabulary`` into words.
    """
    attempt("tokenizer", settle_vocabulary, right=tokenizer)
    if check_recipe is None:
        attempt("microbatches", lambda: check_microbatches(args, config))
    else:
        attempt("megatron_ext.bridge.use", check_recipe)
    microbatches = attempt(
        "batch size",
        lambda: count_microbatches(args),
        right=lambda number: f"{counted(number, 'microbatch')} in the first step",
    )
    return microbatches is not None


def check_schedule(
    args: Any, config: PipelineConfig, prove: Prove, attempt: Attempt = raising
) -> tuple[list[Program], dict[str, list[Program]]] | None:
    """Check the schedule of ``config``; return its programs and the programs of the other schedules
    of --pipeline-race.

    The latter are by schedule. Megatron's own schedule has no programs. The result is None if the
    schedule is refused and ``attempt`` has reported the reason. `check_batches` must have run.
    """
    if config.schedule is None:
        attempt("features", lambda: check_features(args, config))
        return [], {}
    programs = attempt("schedule", lambda: check_parsed_arguments(args, config, prove))
    if programs is None:
        return None
    if len(config.specs) == 1:
        return programs, {}
    contenders = attempt("race", lambda: other_programs(args, config, prove))
    return programs, contenders or {}
