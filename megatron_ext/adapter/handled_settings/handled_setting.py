"""Rows of the tables of Megatron's settings that the schedule or a feature implements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.config import PipelineConfig


def _always(config: PipelineConfig) -> bool:
    return True


@dataclass(frozen=True)
class HandledSetting:
    """Setting of Megatron that our code handles itself: a switch, or a number that is 0 when off.

    Attributes:
        setting: its name in Megatron's arguments and configs.
        text: what our code does instead, or which effect remains.
        by: function that tells whether our given settings implement it.
        stays: whether the setting stays on.
    """

    setting: str
    text: str
    by: Callable[[PipelineConfig], bool] = _always
    stays: bool = False
