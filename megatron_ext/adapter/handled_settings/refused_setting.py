"""Rows of the tables of Megatron's settings that our schedules and features refuse.

A refusal is data, so that checks, pages, records and tests can all read it: a setting, the values
that are refused, the reason, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.base.words import argument_flag
from megatron_ext.compile.feature_settings import setting_of
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.config import flag, flag_with_value
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import ScheduleOptions


def every_schedule(resolved: ResolvedSpec) -> bool:
    return True


def _always(settings: Any) -> bool:
    return True


@dataclass(frozen=True)
class RefusedSetting:
    """Setting of Megatron that our schedules or one of our features refuse.

    Attributes:
        setting: its name in Megatron's arguments and configs.
        unsupported: tells whether a value is refused; not called if the setting does not exist.
        remedy: what the user should write instead.
        by: function that tells whether a given schedule refuses the setting.
        matters: tells whether the setting has an effect, given all other settings.
    """

    setting: str
    unsupported: Callable[[Any], bool]
    remedy: str
    by: Callable[[ResolvedSpec], bool] = every_schedule
    matters: Callable[[Any], bool] = _always


def drop(
    setting: str, why: str = "", by: Callable[[ResolvedSpec], bool] = every_schedule
) -> RefusedSetting:
    """Return the refusal of a switch of Megatron, whose remedy is to drop its flag."""
    flag = argument_flag(setting)
    return RefusedSetting(setting, bool, f"drop {flag}: {why}" if why else f"drop {flag}", by)


def _loads_or_saves(settings: Any) -> bool:
    folders = ("load", "save", "pretrained_checkpoint")
    return any(getattr(settings, name, None) for name in folders)


def parts_the_ends(resolved: ResolvedSpec) -> bool:
    return resolved.example.rank_of[0] != resolved.example.rank_of[-1]


def only_torch_dist(
    why: str, by: Callable[[ResolvedSpec], bool] = every_schedule
) -> RefusedSetting:
    return RefusedSetting(
        "ckpt_format",
        lambda value: value != "torch_dist",
        f"{why}: to load or save, write --ckpt-format torch_dist. What is of another format, "
        f"Megatron converts: add --load FOLDER --ckpt-convert-format torch_dist "
        f"--ckpt-convert-save OTHER --dist-ckpt-optim-fully-reshardable to the line that wrote it, "
        f"without our flags",
        by,
        _loads_or_saves,
    )


_NO_OPTIONS = ScheduleOptions()

# Function that returns the flags which request a feature; None if the feature is off. Its arguments
# are Megatron's settings, the resolved spec of the schedule, and the schedule options.
Requested = Callable[[Any, ResolvedSpec, ScheduleOptions], str | None]


@dataclass(frozen=True)
class RefusalGroup:
    """Megatron's settings that one feature refuses, and the request that switches the feature on.

    Attributes:
        name: heading in docs/compatibility.md that lists the refusals.
        refusals: the refused settings.
        requested: returns the flags that request the feature; errors begin with these flags.
        settings, options: an example of a request.
        check_placement: refuses a schedule whose placement does not work with the feature.
    """

    name: str
    refusals: tuple[RefusedSetting, ...]
    requested: Requested
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: ScheduleOptions = _NO_OPTIONS
    check_placement: Callable[[ResolvedSpec, Placement, ScheduleOptions], None] = (
        lambda resolved, placement, options: None
    )


def by_option(name: str) -> Requested:
    """Return a function that tells how a launch requests the schedule option ``name``.

    The function returns the flag with its value, or None if the option is not requested.
    """

    def requested(settings: Any, resolved: ResolvedSpec, options: ScheduleOptions) -> str | None:
        value = getattr(options, name)
        is_absent = value == getattr(_NO_OPTIONS, name)
        return None if is_absent else flag_with_value(setting_of(name), value)

    return requested


def by_schedule(settings: Any, resolved: ResolvedSpec, options: ScheduleOptions) -> str:
    """Return the flag that requests our schedule, for refusals that hold under every schedule."""
    return f"{flag('schedule')} {resolved.spec}"
