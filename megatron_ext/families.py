"""Stable imports for a schedule family of your own (docs/your-own-schedule.md), wherever the files
behind it move."""

from __future__ import annotations

from megatron_ext.compile.registry import family
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.placement import Placement, line, loop, v, wave
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.search.weight_gradient_filling import fill_best, memory_of

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "Placement",
    "Problem",
    "Schedule",
    "family",
    "fill_best",
    "line",
    "loop",
    "memory_of",
    "v",
    "wave",
]
