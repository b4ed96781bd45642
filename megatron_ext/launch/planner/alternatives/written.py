"""Flags that turn a launch command into another way to train the same job.

A plan is worth as much as the command that it prints. For each change this module finds the
shortest flags that make the launch train that way, and leaves all other words as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_ext.adapter.dimensions import execution, rates
from megatron_ext.adapter.layers import depths_of_stages, layers_of_stages, prediction_depths
from megatron_ext.adapter.layout_arguments import ENDS, LAYOUT, PATTERN, PLACING
from megatron_ext.adapter.model_bytes import state_of
from megatron_ext.adapter.pairs.overlap_setting import FLAG, flags_given, requests_pairs
from megatron_ext.base.words import argument_flag
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.description import describe
from megatron_ext.launch.planner.variants import LaunchVariants
from megatron_ext.planner.candidate import Candidate
from megatron_ext.planner.figures import flags_of
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.outside_passes import rank_passes, seconds_outside_passes
from megatron_ext.planner.verdict import Alternative, Written, is_stock
from megatron_ext.schedule.placement import Placement

CHUNKS_FLAG = "--num-virtual-stages-per-pipeline-rank"


def alternative_of(args: Any, made: Candidate, write: Callable[[], Written]) -> Alternative:
    """Return the candidate ``made`` with the seconds of a whole step, optimizer included.

    If the model is not known, they are those of the passes alone.

    Args:
        args: validated arguments of the job.
        write: makes the flags for ``made``.
    """
    run, state = execution(args, args.seq_length, args.micro_batch_size), state_of(args)
    if made.variant.model is None:
        return Alternative(made, made.step, write)
    reached, ranks = rates(run.precision), args.pipeline_model_parallel_size
    passes = rank_passes(describe(args), run, reached, ranks)
    outside = (
        seconds_outside_passes(rank, state, run, reached, passes) for rank in made.variant.model
    )
    return Alternative(made, made.step + max(outside), write)


def written_for(
    args: Any,
    baseline: tuple[str, Layout],
    made: Candidate,
    layout: Layout,
    costs: Sequence[str] = (),
) -> Written:
    """Return the flags to add and drop so that the launch command trains under ``made``.

    Args:
        args: parsed arguments of the command, not validated.
        baseline: the schedule and the layout that the command has.
        layout: the layers of each stage under ``made``.
        costs: words for a file of costs, for which our schedules are made.
    """
    asks, has = requests_pairs(args), bool(made.report.pairs)
    added = () if is_stock(made) else (*_without_pairs(made), *costs)
    added += (FLAG,) if has and not asks else ()
    dropped = flags_given(args) if asks and not has else ()
    spec, before = baseline
    if (layout, _kind(made.schedule)) != (before, _kind(spec)):
        added += _words(args, made, layout)
        dropped += tuple(argument_flag(name) for name in PLACING if getattr(args, name, None))
    return Written(added, dropped)


def layout_of_variant(variants: LaunchVariants, made: Candidate) -> Layout:
    """Return the layout of layers that the launch has under the candidate ``made``."""
    args, _ = variants.validated(made.schedule, made.method)
    return layout_under(args, made.variant.problem.placement)


def layout_under(args: Any, placement: Placement) -> Layout:
    """Return the layout of layers and of multi-token prediction that ``args`` have on
    ``placement``."""
    depths = depths_of_stages(args) or ()
    if not any(depths[:-1]):
        depths = ()
    return Layout(tuple(layers_of_stages(args, placement)), tuple(depths))


def _without_pairs(made: Candidate) -> tuple[str, ...]:
    return tuple(word for word in flags_of(made) if word != FLAG)


def _kind(spec: str) -> tuple[str, int]:
    """Return the name of the placement of ``spec``, and the number of chunks on a rank."""
    placement = choose(spec).place(2)
    return placement.name, placement.chunks


def _words(args: Any, made: Candidate, layout: Layout) -> tuple[str, ...]:
    """Return the shortest flag, with its value, that gives stages the layers of ``layout``."""
    pattern, chunks = getattr(args, PATTERN, None), made.report.vpp
    if pattern is not None:
        return argument_flag(PATTERN), layout.cut(pattern)
    if layout.is_even:
        is_loop = is_stock(made) and chunks > 1
        return (CHUNKS_FLAG, str(chunks)) if is_loop else ()
    if chunks == 1 and layout.ends is not None and layout.ends[1] > 0:
        first, last = layout.ends
        return argument_flag(ENDS[0]), str(first), argument_flag(ENDS[1]), str(last)
    return argument_flag(LAYOUT), layout.text(prediction_depths(args))
