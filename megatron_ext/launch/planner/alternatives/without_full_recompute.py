"""Schedules without full recompute for a launch command that has it.

Launches recompute every layer if their schedule has no memory left, and pay with a second forward
pass of the whole model. A schedule that needs less memory may do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.base.words import argument_flag
from megatron_ext.compile.registry import entry_of
from megatron_ext.launch.planner.alternatives.changed import Changed
from megatron_ext.planner.candidate import Plan
from megatron_ext.planner.planner import all_specs, make_plan

if TYPE_CHECKING:
    from megatron_ext.launch.planner.variants import LaunchVariants

_FULL_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
# Arguments of full recompute, which the alternative drops from the launch.
WITH_FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "recompute_modules": None,
}


def without_full_recompute(
    variants: LaunchVariants, plan: Plan, allowed_bytes: float | None
) -> Changed | None:
    """Return the schedules with the shortest step without full recompute, for a launch that has it.

    None if the launch has no full recompute, or nothing fits. The schedules fit into
    ``allowed_bytes`` or, if that is not known, into the memory of the schedule that ``plan``
    chooses. Schedules that search are ignored, so that a comparison takes little longer for this.
    """
    if variants.args.recompute_granularity != "full":
        return None
    without = variants.with_values(dict.fromkeys(_FULL_RECOMPUTE))
    if allowed_bytes is None and plan.best is not None:
        allowed_bytes = plan.best.fullest
    specs = [spec for spec in all_specs() if not entry_of(spec).traits.searches]
    made = make_plan(without.variant, allowed_bytes, only_promising=True, specs=specs)
    if made.best is None:
        return None
    given = [name for name in _FULL_RECOMPUTE if getattr(variants.args, name) is not None]
    flags = tuple(map(argument_flag, given))
    return Changed(without, made.tied, flags)
