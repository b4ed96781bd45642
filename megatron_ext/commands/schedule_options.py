"""Options of schedules in commands, as the settings of a training declare them.

If a command declared such an option itself, its name, help and check could differ from the flag's.
Each option is therefore the setting's flag without ``--pipeline-``. Overlapped passes, which no
setting requests, have Megatron's flag.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Annotated, Any

import typer

from megatron_ext.config import (
    OVERLAP,
    PLAN,
    SCHEDULE_SETTINGS,
    PipelineConfig,
    default_text,
    flag,
)
from megatron_ext.schedule.problem import ScheduleOptions

_PREFIX = "--pipeline-"
_PAIRS = "pairs"  # name of the only schedule option that no setting of megatron_ext requests
_OVERLAP_HELP = (
    "Overlap the forward pass of one microbatch with the backward pass of another, so that each "
    "hides the other's all-to-all. overlap_saving= in --costs is the time that a pair saves. "
    "Default: it saves none."
)
_GIVEN = "schedules"  # name of the parameter in which a command gets its schedule options


def option(name: str) -> str:
    """Return the option of a command that stands for the setting ``name`` of a training."""
    return without_prefix(flag(name))


def without_prefix(text: str) -> str:
    """Return ``text``, in which the flags of a training are replaced by the options of commands."""
    return text.replace(_PREFIX, "--")


def declared_option(name: str) -> Any:
    """Return the option for the setting ``name``, with the help that its flag has."""
    (setting,) = (setting for setting in fields(PipelineConfig) if setting.name == name)
    declared = setting.metadata
    return typer.Option(
        option(name),
        metavar=declared.get("metavar"),
        help=without_prefix(declared["help"]),
        show_default=False,  # the help text contains the default
    )


def with_schedule_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with an option for each of `SCHEDULE_SETTINGS`, and for overlapped passes.

    The command gets the values by name in its parameter ``schedules``.
    """
    settings = {setting.name: setting for setting in fields(PipelineConfig)}
    added: dict[str, Any] = {}
    for name in SCHEDULE_SETTINGS:
        kind = bool if settings[name].default is False else str
        added[name] = Annotated[kind, declared_option(name)]
    added[_PAIRS] = Annotated[bool, typer.Option(OVERLAP, help=_OVERLAP_HELP)]
    defaults = {name: default_text(settings[name]) for name in SCHEDULE_SETTINGS} | {_PAIRS: False}

    @functools.wraps(command)
    def taking_options(**given: Any) -> None:
        schedules = {name: given.pop(name) for name in added}
        command(**given, **{_GIVEN: schedules})

    parameters: list[inspect.Parameter] = []
    for one in inspect.signature(command, eval_str=True).parameters.values():
        if one.name != _GIVEN:
            parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        parameters += [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation
            )
            for name, annotation in added.items()
        ]
    taking_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    taking_options.__annotations__ = {one.name: one.annotation for one in parameters}
    return taking_options


def config_and_options(
    schedules: Mapping[str, str | bool], **others: str | None
) -> tuple[PipelineConfig, ScheduleOptions]:
    """Return the settings, and the options of schedules, that the words of a command request.

    Args:
        schedules: values of options by name, as `with_schedule_options` passes them on.
        others: values of further settings.

    Raises:
        ValueError: a value is not understood, or options do not go together.
    """
    given = {name: value for name, value in schedules.items() if name != _PAIRS}
    try:
        config = PipelineConfig.parse(schedule=PLAN, **given, **others)
    except ValueError as error:
        raise ValueError(without_prefix(str(error))) from None
    options = replace(config.options, pairs=bool(schedules[_PAIRS]))
    if (conflict := options.conflict) is not None:
        raise ValueError(conflict.text(*map(options.phrase, conflict.options)))
    return config, options
