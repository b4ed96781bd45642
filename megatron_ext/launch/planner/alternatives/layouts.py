"""The layout of a launch command, alternatives to it, and the flags for them.

A schedule with other stages needs other layers on them, and the best schedule with the launch's own
layout may be worse than another schedule with a better one. Layouts are searched by
`planner.layouts`; here the launch says what may be changed, and what is found becomes flags.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from megatron_ext.adapter.arguments import check_settings
from megatron_ext.adapter.dimensions import execution, rates
from megatron_ext.adapter.job import job_costs, of_arguments
from megatron_ext.adapter.layers import (
    SEGMENT_END,
    layers_of_stages,
)
from megatron_ext.adapter.layout_arguments import PATTERN
from megatron_ext.adapter.model_bytes import state_of
from megatron_ext.adapter.pairs.overlap_setting import DELAY, SETTING, requests_pairs
from megatron_ext.adapter.step_sizes import main_size
from megatron_ext.adapter.stock.stock_settings import stock_executor
from megatron_ext.compile.registry import choose
from megatron_ext.config import ESTIMATE, CostsSource, PipelineConfig
from megatron_ext.cost_model.description import describe
from megatron_ext.cost_model.model import Stage
from megatron_ext.launch.planner.alternatives.recompute import (
    recompute_flags,
    recompute_of_launch,
    with_recompute,
)
from megatron_ext.launch.planner.alternatives.written import layout_under, written_for
from megatron_ext.launch.planner.variants import LaunchVariants
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.layouts.candidates import LayoutRule, Permits
from megatron_ext.planner.layouts.comparison import LayoutComparison, compare_layouts
from megatron_ext.planner.layouts.estimated import estimated_work
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.work import Evaluated, Work
from megatron_ext.planner.verdict import Written
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.placement import Placement, line, loop
from megatron_ext.schedule.stock_executor import STOCK, STOCK_EXECUTOR, StockExecutor


def work_of(
    args: Any, config: PipelineConfig | None = None, stock: StockExecutor = STOCK_EXECUTOR
) -> Work:
    """Return the training of ``args`` for any layout of its layers.

    Args:
        args: validated, with their vocabulary.
        config: settings of schedules.
        stock: how Megatron runs its own schedules.
    """
    model, run = describe(args), execution(args, args.seq_length, args.micro_batch_size)
    ranks = args.pipeline_model_parallel_size
    microbatches = main_size(args).microbatches
    limit = None
    if config is not None and config.memory_limit is not None:
        limit = parse_limit(config.memory_limit, ranks, microbatches)

    def costs_of(stages: Sequence[Stage], placement: Placement, slices: int) -> Costs:
        return job_costs(CostsSource(ESTIMATE), of_arguments(args, placement, stages), slices)

    work = estimated_work(
        model,
        run,
        state_of(args),
        rates(run.precision),
        ranks=ranks,
        microbatches=microbatches,
        limit=limit,
        steps_overlap=config is not None and config.options.steps_overlap,
    )
    speeds = () if config is None or config.rank_speeds is None else config.rank_speeds.values
    return replace(
        work,
        costs_of=costs_of,
        pairs=requests_pairs(args),
        speeds=speeds,
        stock=stock,
        may_separate_prediction=model.mtp_num_layers > 0 and getattr(args, PATTERN, None) is None,
    )


def own_layout(args: Any, spec: str) -> tuple[str, Layout]:
    """Return the schedule ``spec`` with the layout of layers that ``args`` have."""
    return spec, layout_under(args, choose(spec).place(args.pipeline_model_parallel_size))


def rule_of(args: Any) -> LayoutRule:
    """Return the rule by which Megatron lays out the layers of ``args`` for a number of stages."""
    free = copy.copy(args)
    free.pipeline_model_parallel_layout = None
    pattern = getattr(free, PATTERN, None)
    if pattern is not None:
        free.hybrid_layer_pattern = pattern.replace(SEGMENT_END, "")

    def rule(stages: int) -> Layout:
        ranks = args.pipeline_model_parallel_size
        placement = line(ranks) if stages == ranks else loop(ranks, vpp=stages // ranks)
        return Layout(tuple(layers_of_stages(free, placement)))

    return rule


def permits_of(variants: LaunchVariants) -> Permits:
    """Return a function that refuses schedules under which the launch cannot train.

    Megatron's own schedules always pass.
    """

    # A schedule with one stage on each rank overlaps no passes, and is written without the flags
    # that request it (`written_for`).
    alone = variants
    if requests_pairs(variants.args):
        alone = variants.with_values({SETTING: False, DELAY: False})

    @cache
    def refusal(spec: str, method: VocabMethod) -> str | None:
        has_chunks = choose(spec).place(variants.args.pipeline_model_parallel_size).chunks > 1
        try:
            check_settings(*(variants if has_chunks else alone).validated(spec, method))
        except ValueError as error:
            return str(error)
        return None

    def permits(spec: str, method: VocabMethod) -> None:
        family = spec.partition(":")[0]
        if family in STOCK:
            return
        if method not in variants.methods:
            raise ValueError(
                "vocabulary parallelism cannot be compared, since the size of the vocabulary is "
                "not known"
            )
        why = refusal(spec, method)
        if why is not None:
            raise ValueError(why)

    return permits


def written_of(
    variants: LaunchVariants, baseline: Evaluated, made: Evaluated, costs: Sequence[str] = ()
) -> Written:
    """Return the flags to add and drop so that the command trains under ``made``.

    Arguments as in `written_for`.
    """
    before = baseline.schedule, baseline.layout
    written = written_for(variants.args, before, made.candidate, made.layout, costs)
    if made.recompute == baseline.recompute:
        return written
    words, gone = made.recompute.words, recompute_flags(variants.args)
    return Written((*written.added, *words), (*written.dropped, *gone))


def lay_out(
    variants: LaunchVariants,
    args: Any,
    schedule: str,
    allowed_bytes: float | None,
    *,
    search: bool = True,
    tries_recompute: bool = True,
) -> LayoutComparison:
    """Compare layouts of layers for a launch that trains under ``schedule``.

    Args:
        args: validated arguments of the launch, with their vocabulary.
        allowed_bytes: bytes that a rank has for everything; None allows any amount.
        search: as in `compare_layouts`.
        tries_recompute: whether other layers may be recomputed than the launch says.

    Raises:
        ValueError: the unchanged launch cannot train.
    """
    # The settings for Megatron's own schedule are read before the validation, which changes flags.
    stock = stock_executor(variants.args)
    works = [work_of(args, variants.config, stock)]
    if tries_recompute:
        _, *others = recompute_of_launch(variants, args)
        recomputing = (with_recompute(args, option) for option in others)
        works += [work_of(changed, variants.config, stock) for changed in recomputing]
    return compare_layouts(
        works,
        own_layout(args, schedule),
        rule_of(args),
        allowed_bytes,
        permits=permits_of(variants),
        search=search,
    )
