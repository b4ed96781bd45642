"""Schedules under which matrices in FP8 and FP4 get other scales, or are rounded otherwise, than
under Megatron's own (docs/compatibility.md#low-precision).

Such a launch trains, and its losses differ from stock's by rounding. Doctor says so, because a
comparison would otherwise look like a fault.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from megatron_ext.compile.program.verify import Program
from megatron_ext.observe.program_summary import program_of_1f1b
from megatron_ext.schedule.kinds import RULES, Kind

_NO_RANDOM_ROUNDING = "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"


def scale_limits(args: Any, program: Program) -> Iterator[str]:
    """Yield sentences on how FP8 or FP4 gives other numbers under ``program`` than under Megatron.

    Args:
        args: Megatron's arguments.
        program: program of a schedule of ours, compared with Megatron's own schedule.
    """
    placement = program.schedule.placement
    is_v = placement.chunks > 1 and placement.rank_of[0] != 0
    is_delayed = args.fp8 is not None and args.fp8_recipe == "delayed"
    has_history = is_delayed and args.fp8_amax_compute_algo == "max"
    if has_history and is_v:
        yield (
            "--fp8-amax-compute-algo max: a history counts the passes of all stages of a rank, so "
            "scales differ from those of one stage a rank"
        )
    elif has_history and args.recompute_granularity is not None and _reorders(program):
        yield (
            "--fp8-amax-compute-algo max with recompute: a recomputed pass counts in the history, "
            "and this schedule recomputes at other places than 1F1B, so scales differ"
        )
    elif is_delayed and is_v and args.eval_iters:
        yield (
            "--fp8-recipe delayed: an evaluation leaves amaxes from which the next pass of the "
            "rank makes scales, here of another stage than with one stage a rank"
        )
    if args.fp4 and is_v and os.environ.get(_NO_RANDOM_ROUNDING, "0") == "0":
        yield (
            f"--fp4-format: gradients are rounded at random, in the order of a rank's backward "
            f"passes; {_NO_RANDOM_ROUNDING}=1 rounds to the nearest"
        )


def _reorders(program: Program) -> bool:
    """Return whether forward and backward passes of a rank have another order than under 1F1B."""
    return _order(program) != _order(program_of_1f1b(program.problem))


def _order(program: Program) -> list[list[tuple[bool, int]]]:
    """Return, for each rank, its passes in order: (whether it is a forward pass, microbatch)."""
    return [
        [
            (Kind.FORWARD in covers, action.microbatch)
            for action in row
            if {Kind.FORWARD, Kind.BACKWARD_INPUT} & set(covers := RULES[action.kind].covers)
        ]
        for row in program.schedule.compute_rows
    ]
