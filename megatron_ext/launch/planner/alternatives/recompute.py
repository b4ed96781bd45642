"""Megatron's recompute of layers: settings of a launch, alternatives to them, and their flags.

Recompute saves memory and costs time, and which layers are worth it depends on the schedule. Each
setting is tried on the launch itself, so that Megatron's validation and our refusals decide which
of them exist.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron_ext.adapter.compatibility import refuse
from megatron_ext.adapter.dimensions import execution, rates
from megatron_ext.base.words import argument_flag
from megatron_ext.cost_model.description import describe
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.planner.variants import LaunchVariants
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.layouts.recompute import (
    NO_RECOMPUTE,
    LayerRecompute,
    recompute_options,
)

# Further arguments for recompute that all alternatives switch off: other names for those of
# `LayerRecompute.arguments`, or arguments of full recompute only.
_SWITCHES = ("recompute_activations", "moe_layer_recompute", "distribute_saved_activations")


def recompute_of_launch(variants: LaunchVariants, args: Any) -> list[LayerRecompute]:
    """Return the recompute settings of a launch, and alternatives that Megatron and we accept.

    The launch's own setting comes first. ``args`` are its validated arguments.
    """
    run = execution(args, args.seq_length, args.micro_batch_size)
    own_refusal = _refusal(variants)

    def permits(option: LayerRecompute) -> bool:
        switches = dict.fromkeys(
            (name for name in _SWITCHES if hasattr(variants.args, name)), False
        )
        changed = variants.with_values({**switches, **option.arguments})
        # If the launch itself is refused for the same reason, recompute is not to blame.
        return _refusal(changed) in (None, own_refusal)

    return recompute_options(describe(args), run, rates(run.precision), permits)


def _refusal(variants: LaunchVariants) -> str | None:
    """Return the reason why the launch cannot train; None if it can."""
    assert variants.launch_schedule is not None
    try:
        args, config = variants.validated(variants.launch_schedule, VocabMethod.NAIVE)
        megatron_arguments.check_model(args, config)
        refuse(args, config.resolved_spec, config.options)
    except ValueError as error:
        return str(error)
    return None


def with_recompute(args: Any, option: LayerRecompute) -> Any:
    """Return validated ``args`` with the recompute setting ``option``."""
    changed = copy.copy(args)
    for name, value in option.arguments.items():
        setattr(changed, name, value)
    return changed


def recompute_flags(args: Any) -> tuple[str, ...]:
    """Return the flags of recompute that are set in ``args``, which are not validated."""
    names = (*NO_RECOMPUTE.arguments, *_SWITCHES)
    return tuple(argument_flag(name) for name in names if getattr(args, name, None))
