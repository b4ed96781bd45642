"""Recompute of layers by Megatron in a launch: its own, alternatives, and the flags for them."""

from __future__ import annotations

import copy
from typing import Any

from megatron_ext.adapter.compatibility import refuse
from megatron_ext.adapter.dimensions import execution, rates
from megatron_ext.cost_model.description import describe
from megatron_ext.launch_command import line as launch_line
from megatron_ext.launch_planner.variants import LineVariants
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.layouts.recompute import (
    NO_RECOMPUTE,
    LayerRecompute,
    recompute_options,
)

# Beside `LayerRecompute.arguments`: they say the same, or go with full recompute alone.
_SWITCHES = ("recompute_activations", "moe_layer_recompute", "distribute_saved_activations")


def recompute_of_line(line: LineVariants, args: Any) -> list[LayerRecompute]:
    """Return the recompute of ``line`` and its alternatives, as far as neither Megatron nor we
    refuse them.

    ``args``: its arguments, validated.
    """
    run = execution(args, args.seq_length, args.micro_batch_size)
    before = _refusal(line)

    def permits(option: LayerRecompute) -> bool:
        switches = dict.fromkeys((name for name in _SWITCHES if hasattr(line.args, name)), False)
        changed = line.with_values({**switches, **option.arguments})
        return _refusal(changed) in (None, before)

    return recompute_options(describe(args), run, rates(run.precision), permits)


def _refusal(line: LineVariants) -> str | None:
    """Return the reason why ``line`` cannot train as it is; None if it can."""
    assert line.own is not None
    try:
        args, config = line.validated(line.own, VocabMethod.NAIVE)
        launch_line.check_model(args, config)
        refuse(args, config.choice, config.extras)
    except ValueError as error:
        return str(error)
    return None


def with_recompute(args: Any, option: LayerRecompute) -> Any:
    """Return the validated ``args`` with ``option``."""
    changed = copy.copy(args)
    for name, value in option.arguments.items():
        setattr(changed, name, value)
    return changed


def recompute_flags(args: Any) -> tuple[str, ...]:
    """Return the flags of recompute that ``args``, which are not validated, have."""
    names = (*NO_RECOMPUTE.arguments, *_SWITCHES)
    return tuple(f"--{name.replace('_', '-')}" for name in names if getattr(args, name, None))
