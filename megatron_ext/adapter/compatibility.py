"""Compatibility of Megatron's settings with a schedule and its options.

Some settings are refused whatever the schedule is (`refusals`). Others depend on the schedule's
rows: Transformer Engine replays CUDA graphs and FP8 scales in the order of microbatches, and
Megatron supports few placements. These are checked here, on the schedule itself.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from megatron_ext.adapter.handled_settings.microbatch_groups import with_megatrons_group
from megatron_ext.adapter.handled_settings.refused_setting import RefusalGroup
from megatron_ext.adapter.pairs.overlap_setting import FLAG, with_requested_pairs
from megatron_ext.adapter.refusals import REFUSALS
from megatron_ext.adapter.transformer_engine.capture_order import capture_order, check_capture
from megatron_ext.adapter.transformer_engine.captured import GRAPHS, captures
from megatron_ext.base.words import counted
from megatron_ext.compile.registry import ResolvedSpec, with_option
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import ScheduleOptions
from megatron_ext.schedule.schedule import Schedule

_NO_OPTIONS = ScheduleOptions()


def refuse(settings: Any, resolved: ResolvedSpec, options: ScheduleOptions = _NO_OPTIONS) -> None:
    """Raise ValueError for the first setting of Megatron that the schedule or its options refuse.

    Args:
        settings: Megatron's parsed arguments or a TransformerConfig.
        resolved: the schedule's spec.
        options: options of the schedule.
    """
    placement = resolved.place(settings.pipeline_model_parallel_size)
    _refuse_placement(resolved, placement)
    chunks = settings.virtual_pipeline_model_parallel_size or 1
    if chunks != placement.chunks:
        raise ValueError(
            f"--pipeline-schedule {resolved.spec} puts {counted(placement.chunks, 'stage')} on "
            f"each rank, and Megatron's virtual-stage flags or the layout set {chunks}: remove the "
            f"flags, which the schedule does not need, or give the layout "
            f"{len(placement.rank_of)} stages"
            + (f"; or write {_with_chunks(resolved, chunks)}" if placement.name == "loop" else "")
        )
    with_megatrons_group(resolved, settings)
    for group in REFUSALS:
        _refuse_settings(settings, resolved, options, group)
    _refuse_pairs(settings, resolved, options)
    for group in REFUSALS:
        if group.requested(settings, resolved, options) is not None:
            group.check_placement(resolved, placement, options)


def _refuse_pairs(settings: Any, resolved: ResolvedSpec, options: ScheduleOptions) -> None:
    if resolved.has_pairs and not with_requested_pairs(options, settings).pairs:
        raise ValueError(
            f"--pipeline-schedule {resolved.spec} overlaps forward and backward passes: add "
            f"{FLAG}, or write a schedule in which these passes run one after the other"
        )


def _refuse_settings(
    settings: Any, resolved: ResolvedSpec, options: ScheduleOptions, group: RefusalGroup
) -> None:
    requested = group.requested(settings, resolved, options)
    if requested is None:
        return
    for refusal in group.refusals:
        if not (refusal.by(resolved) and refusal.matters(settings)):
            continue
        value = getattr(settings, refusal.setting, None)
        if value is not None and refusal.unsupported(value):
            raise ValueError(
                f"{requested} does not go with {refusal.setting}={value}: {refusal.remedy}"
            )


def refuse_order(settings: Any, schedule: Schedule) -> None:
    """Raise ValueError if ``schedule`` breaks an order that Transformer Engine needs.

    Only a user's schedule file can break it: the schedules that megatron_ext generates run the
    microbatches in one order in all passes.
    """
    if captures(settings):
        _refuse_capture_order(schedule)
    if getattr(settings, "transformer_impl", None) != "transformer_engine":
        return
    is_quantised = any(getattr(settings, name, None) for name in ("fp8", "fp4"))
    # `SlicedStage` keeps Transformer Engine from overwriting gradients of unquantised weights.
    is_sliced = schedule.arrays.slices > 1
    if settings.gradient_accumulation_fusion and (is_quantised or not is_sliced):
        _refuse_first_weight_gradient(schedule)
    scales_lag = bool(getattr(settings, "fp8", None)) and settings.fp8_recipe == "delayed"
    if scales_lag and settings.recompute_granularity is not None:
        _refuse_recompute_order(schedule)


def _refuse_capture_order(schedule: Schedule) -> None:
    """Refuse a schedule in which the k-th CUDA graph of a stage is not that of microbatch k."""
    if not _in_order(schedule, Kind.BACKWARD_INPUT):
        return  # the schedule is an evaluation's, which uses no CUDA graphs
    for row, stages in zip(schedule.rows, schedule.placement.stages_of, strict=True):
        try:
            check_capture(capture_order(row, stages), row, stages)
        except ValueError as error:
            raise ValueError(
                f"{schedule.name} does not go with {GRAPHS}: {error}, or write "
                f"--cuda-graph-impl none"
            ) from error


def _refuse_first_weight_gradient(schedule: Schedule) -> None:
    """Refuse a schedule whose first W of a stage is not for the microbatch of the stage's first F.

    Transformer Engine overwrites ``main_grad`` with the weight gradients of that microbatch, and
    adds those of all others.
    """
    forwards = _in_order(schedule, Kind.FORWARD)
    for stage, (first, *_) in _in_order(schedule, Kind.BACKWARD_WEIGHT).items():
        begun = forwards[stage][0]
        if first.microbatch != begun.microbatch:
            raise ValueError(
                f"{schedule.name}: the first weight gradient on stage {stage} is {first}, but the "
                f"stage's first forward pass is {begun}: Transformer Engine stores that pass's "
                "weight gradient without adding those computed before, which are lost: run "
                f"{begun._replace(kind=first.kind)} first, or add --no-gradient-accumulation-fusion"
            )


def _refuse_recompute_order(schedule: Schedule) -> None:
    """Refuse a schedule that recomputes microbatches in another order than its forward passes.

    With delayed FP8 scaling each forward pass puts its scales into a queue, and recomputes take
    them in that order.
    """
    forwards = _in_order(schedule, Kind.FORWARD)
    for stage, backwards in _in_order(schedule, Kind.BACKWARD_INPUT).items():
        for forward, backward in zip(forwards[stage], backwards, strict=True):
            if forward.microbatch != backward.microbatch:
                raise ValueError(
                    f"{schedule.name}: {backward} runs before the backward pass of {forward}; "
                    "with --fp8-recipe delayed Transformer Engine recomputes passes with FP8 "
                    f"scales in the order of stage {stage}'s forward passes: run backward passes "
                    "in that order, choose another --fp8-recipe, or drop --recompute-granularity"
                )


def _in_order(schedule: Schedule, kind: Kind) -> dict[int, list[Action]]:
    """Return the passes of each stage that include ``kind``, in order.

    A full backward pass (B) includes those of the input gradient (I) and the weight gradient (W).
    """
    passes = defaultdict(list)
    for action in (action for row in schedule.compute_rows for action in row):
        if kind in RULES[action.kind].covers:
            passes[action.stage].append(action)
    return passes


def _with_chunks(resolved: ResolvedSpec, chunks: int) -> str:
    return with_option(resolved.spec.split(":")[0], "vpp", chunks)


def _refuse_placement(resolved: ResolvedSpec, placement: Placement) -> None:
    """Refuse a placement that Megatron does not support.

    Only a user's schedule file can have one.
    """
    counts = [len(stages) for stages in placement.stages_of]
    if len(set(counts)) > 1:
        raise ValueError(
            f"--pipeline-schedule {resolved.spec} puts {counts} stages on its ranks: Megatron "
            "requires the same number on every rank; give each rank the same number in the "
            "schedule file"
        )
    if placement.rank_of[-1] != placement.ranks - 1:
        raise ValueError(
            f"--pipeline-schedule {resolved.spec} puts the last stage on pipeline rank "
            f"{placement.rank_of[-1]}, and Megatron looks for the loss on the last rank, "
            f"{placement.ranks - 1}: renumber the ranks in the schedule file"
        )
