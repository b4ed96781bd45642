"""Records of the names that users import: those of the package, and those for a user's own
family."""

from __future__ import annotations

import argparse
import enum
import inspect
import types
from dataclasses import fields
from functools import partial
from typing import Any

import megatron_ext
from megatron_ext import families
from megatron_ext.compile.registry import family
from megatron_ext.config import PipelineConfig, flag, variable
from megatron_ext.patches.engine import Handle, PatchError
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.placement import Placement, line, loop, v, wave
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.search.weight_gradient_filling import (
    TimedOrder,
    fill_best,
    memory_of,
    time,
)
from megatron_ext.written_settings import add_flags
from tests.behaviour.record import Subject

_OF_FAMILIES = (
    *(Action, Kind, Costs, TimedOrder, fill_best, memory_of, time),
    *(Placement, line, loop, v, wave, family, Problem, Schedule),
)


def names() -> Subject:
    return {
        "megatron_ext": _of_package,
        "settings": _settings,
        "what docs/your-own-schedule.md imports": _imports,
        **{
            thing.__name__: partial(_described, thing)
            for thing in (megatron_ext.install, Handle, PatchError, *_OF_FAMILIES)
        },
    }


def _of_package() -> str:
    return "\n".join(
        name
        for name, value in sorted(vars(megatron_ext).items())
        if not (name.startswith("_") or isinstance(value, types.ModuleType))
        and name not in ("annotations", "TYPE_CHECKING")
    )


def _settings() -> str:
    defaults = vars(add_flags(argparse.ArgumentParser()).parse_args([]))
    return "\n".join(
        f"{flag(setting.name)} {variable(setting.name)} {defaults[f'pipeline_{setting.name}']!r}"
        for setting in fields(PipelineConfig)
    )


def _imports() -> str:
    return "\n".join(f"from megatron_ext.families import {name}" for name in families.__all__)


def _described(thing: Any) -> str:
    """Return the signature of ``thing`` and, for a class, its members."""
    if isinstance(thing, type) and issubclass(thing, Exception):
        return f"{thing.__name__}: {', '.join(base.__name__ for base in thing.__bases__)}"
    lines = [f"{thing.__name__}{inspect.signature(thing)}"]
    if isinstance(thing, type):
        builtin = {name for base in (tuple, str) for name in dir(base)}
        has = [f".{name}" for name in dir(thing) if name[0] != "_" and name not in builtin]
        if issubclass(thing, enum.Enum):
            has = [f".{name} = {member.value}" for name, member in thing.__members__.items()]
        lines += has
    return "\n".join(lines)
