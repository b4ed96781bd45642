"""Megatron's microbatch_group_size_per_vp_stage as an option of our schedules.

In Megatron the flag belongs to its interleaved function, which our schedules replace. Families on a
loop have the same choice as their option ``group``, so that the flag keeps its meaning.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.compile.registry import ResolvedSpec, choose, options_of, with_option

_OPTION = "group"
_SETTING = "microbatch_group_size_per_vp_stage"


def with_megatrons_group(resolved: ResolvedSpec, settings: Any) -> ResolvedSpec:
    """Return ``resolved`` with the microbatch group size that Megatron's ``settings`` request.

    The group size is the number of microbatches that a rank runs consecutively in one virtual
    stage. ``settings`` are Megatron's arguments or a config. ``resolved`` stays unchanged if
    ``settings`` have the default group size, or if its schedule has no groups.

    Raises:
        ValueError: ``resolved`` has another group size.
    """
    group = getattr(settings, _SETTING, None)
    ranks = settings.pipeline_model_parallel_size
    accepted, given = options_of(resolved.spec)
    if group in (None, ranks) or _OPTION not in accepted:
        return resolved
    if given.get(_OPTION, group) not in (0, group):
        raise ValueError(
            f"--pipeline-schedule {resolved.spec} does not go with {_SETTING}={group}, Megatron's "
            f"setting for the size of its groups: drop {_SETTING} or --pipeline-schedule"
        )
    return resolved if _OPTION in given else choose(with_option(resolved.spec, _OPTION, group))
