"""Declarations of settings: the metadata of the fields of `PipelineConfig`.

A setting has a flag, an environment variable, a keyword of `install` and a line of help, all of
which must agree. It is declared once, as a field of `PipelineConfig` with what is made here: how
its value is read, how the help names it, and with what it conflicts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Parser of a setting: a function of its name (for errors) and its value.
Parse = Callable[[str, Any], Any]

# Metadata of a setting's field: its parser, its help, and the placeholder for its value.
Metadata = Mapping[str, Any]

# Metadata of a setting that also acts on Megatron's own schedule.
ON_STOCK: dict[str, Any] = {"on_stock": True}
# Metadata of a setting that names schedules itself, and so needs no --pipeline-schedule.
NAMES_SCHEDULES: dict[str, Any] = {"names_schedules": True}


@dataclass(frozen=True)
class FeatureSettings:
    """Settings of one feature, such as offload, with their conflicts.

    Attributes:
        declared: the metadata of each field of `PipelineConfig` that is a setting of the feature,
            by the field's name.
        check: function that refuses a `PipelineConfig` by a ValueError, if settings of the feature
            do not go together, or not with others. Options of a schedule are compared elsewhere.
        completed: function that returns the settings that follow from the parsed ones, under a
            schedule that is not chosen later.
        values: values of another setting by which the feature is requested.
        only_watches: whether the feature watches steps, and changes nothing of them.
    """

    declared: Mapping[str, Metadata]
    check: Callable[[Any], None] = lambda config: None
    completed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda parsed: {}
    values: tuple[str, ...] = ()
    only_watches: bool = False

    @property
    def acts_on_stock(self) -> bool:
        """Whether the feature also acts on Megatron's own pipeline."""
        return any(metadata.get("on_stock") for metadata in self.declared.values())


def flag(name: str) -> str:
    """Return the command-line flag of the setting ``name``."""
    return f"--pipeline-{name.replace('_', '-')}"


def flag_with_value(name: str, value: object) -> str:
    """Return the setting ``name`` with ``value``, as written on a command line."""
    return flag(name) + ("" if value is True else f" {value}")


def conflicting(config: Any, name: str, other: str, why: str) -> ValueError:
    """Return the error that two settings of ``config`` exclude each other, and ``why``."""
    first, second = (flag_with_value(each, getattr(config, each)) for each in (name, other))
    return ValueError(f"{first} does not go with {second}: {why}")


def as_given(name: str, value: Any) -> Any:
    """Return the value of a setting as the user wrote it."""
    return value


def as_path(name: str, text: str) -> Path:
    """Return the text of a setting as a path."""
    return Path(text)


def setting(parse: Parse, metavar: str, help: str) -> dict[str, Any]:
    """Declare a setting whose value ``parse`` reads and the help calls ``metavar``."""
    return {"parse": parse, "metavar": metavar, "help": help}


def enumerated(values: type[enum.StrEnum], help: str) -> dict[str, Any]:
    """Declare a setting whose value is one of the members of ``values``."""

    def parse(name: str, text: str) -> enum.StrEnum:
        if text not in list(values):
            *others, last = values
            raise ValueError(f"{flag(name)} {text}: write {', '.join(others)} or {last}")
        return values(text)

    return setting(parse, f"{{{','.join(values)}}}", help)


def switch(help: str) -> dict[str, Any]:
    """Declare a setting that is on or off."""
    return {"parse": as_given, "help": help}
