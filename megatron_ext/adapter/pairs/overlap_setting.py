"""Megatron's flag that requests overlapped forward and backward passes.

Overlapped passes are an option of the schedule, like options that have flags of our own. Here
Megatron's flag becomes that option, and options that conflict with it are refused with errors that
name the flags that the user knows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_ext.base.words import argument_flag
from megatron_ext.config import flag
from megatron_ext.schedule.problem import ScheduleOptions

SETTING = "overlap_moe_expert_parallel_comm"
FLAG = "--overlap-moe-expert-parallel-comm"
# argument of Megatron that requires --overlap-moe-expert-parallel-comm
DELAY = "delay_wgrad_compute"


def requests_pairs(settings: Any) -> bool:
    """Return whether ``settings``, Megatron's arguments or a config, request overlapped passes."""
    return getattr(settings, SETTING, None) is True


def flags_given(settings: Any) -> tuple[str, ...]:
    """Return the flags about overlapped passes that ``settings`` have."""
    given = (name for name in (SETTING, DELAY) if getattr(settings, name, None) is True)
    return tuple(map(argument_flag, given))


def with_requested_pairs(options: ScheduleOptions, settings: Any) -> ScheduleOptions:
    """Return ``options`` with overlapped passes, if Megatron's ``settings`` request them.

    Raises:
        ValueError: overlapped passes conflict with another option in ``options``.
    """
    if not requests_pairs(settings):
        return options
    options = replace(options, pairs=True)
    conflict = options.conflict
    if conflict is not None and "pairs" in conflict.options:
        (other,) = set(conflict.options) - {"pairs"}
        raise ValueError(conflict.text(FLAG, flag(other)))
    return options
