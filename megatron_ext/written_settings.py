"""Settings as users write them: flags on a command line, variables in the environment.

The same settings are written as flags of a script, as variables of the environment, or as both.
They are read before Megatron's parser exists, among words that are not ours, and the flag wins over
the variable. A misspelt variable is named, since nothing else would notice it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any

from megatron_ext.base.words import meant_by
from megatron_ext.compile.feature_settings import NAMING_SCHEDULES
from megatron_ext.config import (
    ALLOW_UNKNOWN,
    PREFIX,
    VARIABLES,
    PipelineConfig,
    default_text,
    flag,
    flag_with_value,
    is_on_stock,
    variable,
)
from megatron_ext.schedule.problem import Offload

MEGATRONS_OFFLOAD = "--fine-grained-activation-offloading"


_GROUP = "megatron_ext"


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Declare our flags, in their own group, on ``parser``, unless it has them.

    Raises:
        ValueError: the parser has a flag of the same name that is not ours.
    """
    if any(group.title == _GROUP for group in parser._action_groups):
        return parser
    known = parser._option_string_actions
    taken = next((name for name in our_flags() if name in known), None)
    if taken is not None:
        raise ValueError(flag_taken(taken))
    group = parser.add_argument_group(_GROUP, "pipeline schedules of megatron_ext")
    for setting in fields(PipelineConfig):
        takes: dict[str, Any] = {"action": "store_true"}
        if setting.default is not False:
            # The value of an argument is text, the default too, since a checkpoint stores the
            # arguments and must be readable without megatron_ext.
            takes = {"default": default_text(setting), "metavar": setting.metadata["metavar"]}
        named = {"dest": PREFIX + setting.name, "help": setting.metadata["help"]}
        group.add_argument(flag(setting.name), **named, **takes)
    return parser


def our_flags() -> list[str]:
    """Return the flags that `add_flags` adds."""
    return [flag(setting.name) for setting in fields(PipelineConfig)]


def flag_taken(name: str) -> str:
    """Return why our flag ``name`` cannot be added to a script's parser that has one like it."""
    return (
        f"{name}: the script's parser has a flag of that name, and megatron_ext adds one: rename "
        f"the script's"
    )


Given = Mapping[str, str | bool]  # settings as a user has written them


def from_argv(argv: Sequence[str]) -> PipelineConfig:
    """Return the settings in a script's command line, which may have any other words."""
    given = given_in(argv)
    return PipelineConfig.parse(**given, **for_megatrons_offload(argv, given))


def for_megatrons_offload(argv: Sequence[str], given: Given) -> dict[str, str | bool]:
    """Return our setting for offload that takes the place of Megatron's offload flag in ``argv``.

    The result is empty without that flag or a schedule of ours, or if the setting is ``given``.
    """
    ours, has_schedule = "activation_offload", not given.keys().isdisjoint(NAMING_SCHEDULES)
    if MEGATRONS_OFFLOAD not in argv or not has_schedule or ours in given:
        return {}
    return {ours: str(Offload.FIT if "memory_limit" in given else Offload.FULL)}


def given_in(argv: Sequence[str]) -> dict[str, str | bool]:
    """Return the values of the settings whose flags are in a script's command line."""
    return given_and_others(argv)[0]


def given_and_others(argv: Sequence[str]) -> tuple[dict[str, str | bool], list[str]]:
    """Return the values of the settings whose flags are in ``argv``, and its other words."""
    parser = add_flags(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    parsed, others = parser.parse_known_args(argv)
    arguments = vars(parsed)
    given = {name: arguments[PREFIX + name] for name in _settings() if says(argv, name)}
    return given, others


def ours_and_others(words: Sequence[str], more: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Return the words of our flags and of the switches ``more``, each with its value, and the
    other words, all in order."""
    takes_value = {
        flag(name): setting.default is not False for name, setting in _settings().items()
    }
    ours: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        name = word.partition("=")[0]
        if name not in takes_value and word not in more:
            others.append(word)
            continue
        ours.append(word)
        if takes_value.get(name) and name == word:
            ours += [value for value in [next(rest, None)] if value is not None]
    return ours, others


def settings_given(argv: Sequence[str]) -> bool:
    """Return whether a script's command line has one of our flags."""
    return any(says(argv, name) for name in _settings())


def says(argv: Sequence[str], name: str) -> bool:
    """Return whether a script's command line has the flag of the setting ``name``."""
    return any(word.split("=")[0] == flag(name) for word in argv)


def given_in_environment(
    written: Given, env: Mapping[str, str]
) -> tuple[dict[str, str | bool], list[str]]:
    """Return the settings that variables in ``env`` add to the settings ``written`` on a command
    line, for `megatron_ext.launch.script`, and a line for each variable that a flag with another
    value overrules.

    Raises:
        ValueError: a variable is no setting, but looks like one; or a switch is neither 1 nor 0.
    """
    values = _variables(env)
    for name in _unknown_variables(env):
        if meant := _meant(name):
            raise ValueError(f"{name} is not a setting: {meant}")
    added: dict[str, str | bool] = {
        name: value for name, value in values.items() if value and name not in written
    }
    overruled = [
        f"{flag_with_value(name, written[name])} counts, not {variable(name)}={env[variable(name)]}"
        for name, value in values.items()
        if name in written and written[name] != value
    ]
    return added, overruled


def words_of(given: Given) -> list[str]:
    """Return the flags of the settings ``given``, none of which is False."""
    return [
        word
        for name, value in given.items()
        for word in ([flag(name), value] if isinstance(value, str) else [flag(name)])
    ]


def from_environment(env: Mapping[str, str]) -> PipelineConfig:
    """Return the settings in environment variables, for `megatron_ext.auto`. Empty variables are
    ignored.

    Raises:
        ValueError: there is neither a schedule among them nor a setting that acts on Megatron's
            own, a variable ``MEGATRON_EXT_*`` is no setting, or a setting is not understood.
    """
    for name in _unknown_variables(env):
        known = ", ".join(map(variable, _settings()))
        raise ValueError(
            f"{name} is not a setting: {_meant(name) or f'write one of the settings {known}'}"
        )
    values = _variables(env)
    settings = _settings()
    stand_alone = any(name in NAMING_SCHEDULES or is_on_stock(settings[name]) for name in values)
    if not stand_alone:
        raise ValueError(
            f"{variable('schedule')} is not set: export {variable('schedule')}=zb-h1, or another "
            f"of 'megatron-ext schedules', or do not import megatron_ext.auto"
        )
    try:
        return PipelineConfig.parse(**values)
    except ValueError as error:
        raise ValueError(
            f"in the variables {VARIABLES}* (--pipeline-x is {variable('x')}): {error}"
        ) from error


def _settings() -> dict[str, Field[Any]]:
    return {setting.name: setting for setting in fields(PipelineConfig)}


def _variables(env: Mapping[str, str]) -> dict[str, str | bool]:
    """Return the values of settings in ``env``. Empty variables are ignored."""
    return {
        name: _value(setting, text)
        for name, setting in _settings().items()
        if (text := env.get(variable(name)))
    }


def _unknown_variables(env: Mapping[str, str]) -> list[str]:
    known = {*map(variable, _settings()), ALLOW_UNKNOWN}
    return sorted(
        name
        for name, value in env.items()
        if name.startswith(VARIABLES) and value and name not in known
    )


def _meant(name: str) -> str:
    """Return a question that names the variable most similar to ``name``; empty if none is
    similar."""
    # The prefix is removed, since with it every name of a setting resembles every other.
    meant = meant_by(name.removeprefix(VARIABLES), _settings())
    return f"did you mean {' or '.join(map(variable, meant))}?" if meant else ""


def _value(setting: Field[object], text: str) -> str | bool:
    if setting.default is not False:
        return text
    if text not in ("0", "1"):
        raise ValueError(f"{variable(setting.name)}={text}: write 1, or 0 for its default")
    return text == "1"
