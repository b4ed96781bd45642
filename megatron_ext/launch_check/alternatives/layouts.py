"""A launch line's layout, others that it could have, and what to write for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megatron_ext.adapter.arguments import check_settings
from megatron_ext.adapter.dimensions import execution, rates
from megatron_ext.adapter.job import job_costs, of_arguments
from megatron_ext.adapter.layers import (
    SEGMENT_END,
    layers_of_stages,
    prediction_depths,
)
from megatron_ext.adapter.model_bytes import state_of
from megatron_ext.adapter.pairs.overlap_setting import requests_pairs
from megatron_ext.config import ESTIMATE, CostsSource, PipelineConfig
from megatron_ext.launch_check.alternatives.pairs import flags_beside
from megatron_ext.launch_check.alternatives.recompute import (
    recompute_flags,
    recompute_of_line,
    with_recompute,
)
from megatron_ext.launch_check.variants import LineVariants
from megatron_ext.schedule.build.registry import choose
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.model.description import describe
from megatron_ext.schedule.model.model import Stage
from megatron_ext.schedule.placement import Placement, line, loop
from megatron_ext.schedule.plan.candidate import Plan, VocabMethod
from megatron_ext.schedule.plan.layouts.candidates import Permits, Rule
from megatron_ext.schedule.plan.layouts.estimated import estimated_work
from megatron_ext.schedule.plan.layouts.layout import Layout
from megatron_ext.schedule.plan.layouts.lines import STOCK, Lines, compare_layouts
from megatron_ext.schedule.plan.layouts.work import Evaluated, Work, work_of_stages

_LAYOUT = "pipeline_model_parallel_layout"
_PATTERN = "hybrid_layer_pattern"
_CHUNKS = "num_virtual_stages_per_pipeline_rank"
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
# What on a line says which layers lie on which stage, beside a pattern.
_PLACING = (
    *("num_layers_per_virtual_pipeline_stage", _CHUNKS, _LAYOUT, *_ENDS),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


def work_of(args: Any, config: PipelineConfig | None = None) -> Work:
    """What ``args`` train, whatever the layout. They are validated, and have their vocabulary.

    ``config``: what is asked of schedules beside.
    """
    model, run = describe(args), execution(args, args.seq_length, args.micro_batch_size)
    ranks = args.pipeline_model_parallel_size
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    limit = None
    if config is not None and config.memory_limit is not None:
        limit = parse_limit(config.memory_limit, ranks, microbatches)

    def costs_of(stages: Sequence[Stage], placement: Placement) -> Costs:
        return job_costs(CostsSource(ESTIMATE), of_arguments(args, placement, stages), slices=1)

    work = estimated_work(
        model,
        run,
        state_of(args),
        rates(run.precision),
        ranks=ranks,
        microbatches=microbatches,
        limit=limit,
        post_validation=config is not None and config.post_validation,
    )
    return replace(work, costs_of=costs_of, pairs=requests_pairs(args))


def own_layout(args: Any, spec: str) -> tuple[str, Layout]:
    """The schedule ``spec`` with the layout that ``args`` have."""
    placement = choose(spec).place(args.pipeline_model_parallel_size)
    return spec, Layout(tuple(layers_of_stages(args, placement)))


def rule_of(args: Any) -> Rule:
    """The layout that Megatron makes of ``args`` by itself for so many stages."""
    free = copy.copy(args)
    free.pipeline_model_parallel_layout = None
    pattern = getattr(free, _PATTERN, None)
    if pattern is not None:
        free.hybrid_layer_pattern = pattern.replace(SEGMENT_END, "")

    def rule(stages: int) -> Layout:
        ranks = args.pipeline_model_parallel_size
        placement = line(ranks) if stages == ranks else loop(ranks, vpp=stages // ranks)
        return Layout(tuple(layers_of_stages(free, placement)))

    return rule


def permits_of(line: LineVariants) -> Permits:
    """Whether ``line`` can be trained under a schedule: stock's ones at least as far as we ask."""

    @cache
    def refusal(family: str, method: VocabMethod) -> str | None:
        try:
            check_settings(*line.validated(family, method))
        except ValueError as error:
            return str(error)
        return None

    def permits(spec: str, method: VocabMethod) -> None:
        family = spec.partition(":")[0]
        if family in STOCK:
            return
        if method not in line.methods:
            raise ValueError("the vocabulary is not known")
        why = refusal(spec, method)
        if why is not None:
            raise ValueError(why)

    return permits


@dataclass(frozen=True)
class Written:
    """What is written on a line, and Megatron's flags that go from it."""

    added: tuple[str, ...]
    dropped: tuple[str, ...] = ()


def written_for(args: Any, own: Evaluated, made: Evaluated, costs: Sequence[str] = ()) -> Written:
    """What to write on the line of ``args``, which are not validated, for ``made``.

    Args:
        own: the line as it stands.
        costs: words for a file of costs, which our schedules are made for.
    """
    family = made.schedule.partition(":")[0]
    added, dropped = flags_beside(args, made.candidate)
    added = () if family in STOCK else (*added, *costs)
    if (made.layout, _kind(made.schedule)) != (own.layout, _kind(own.schedule)):
        added += _words(args, made, getattr(args, _PATTERN, None))
        dropped += tuple(_flag(name) for name in _PLACING if getattr(args, name, None))
    if made.recompute != own.recompute:
        added += made.recompute.words
        dropped += recompute_flags(args)
    return Written(added, dropped)


def _kind(spec: str) -> tuple[str, int]:
    """How the stages of ``spec`` lie."""
    placement = choose(spec).place(2)
    return placement.name, placement.chunks


def _words(args: Any, made: Evaluated, pattern: str | None) -> tuple[str, ...]:
    """Which layers are on which stage, as short as it can be said."""
    layout, chunks = made.layout, made.candidate.report.vpp
    if pattern is not None:
        return _flag(_PATTERN), layout.cut(pattern)
    is_stock = made.schedule.partition(":")[0] in STOCK
    if layout.is_even:
        return (_flag(_CHUNKS), str(chunks)) if is_stock and chunks > 1 else ()
    if chunks == 1 and layout.ends is not None and layout.ends[1] > 0:
        first, last = layout.ends
        flag_first, flag_last = map(_flag, _ENDS)
        return flag_first, str(first), flag_last, str(last)
    return _flag(_LAYOUT), layout.text(prediction_depths(args))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class LaidOut:
    """What other layouts would gain on a line.

    Attributes:
        written: for each of `Lines.others`, what to write on the line.
    """

    lines: Lines
    written: tuple[Written, ...]

    def as_data(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        own, others = self.lines.own, zip(self.lines.others.items(), self.written, strict=True)
        return {
            "bound": self.lines.bound,
            "own": _as_data(own, self.lines),
            **{
                name: _as_data(made, self.lines)
                | {"flags": written.added, "dropped": written.dropped}
                for (name, made), written in others
            },
        }


def _as_data(made: Evaluated, lines: Lines) -> dict[str, Any]:
    return {
        "schedule": made.schedule,
        "vocabulary": made.method.value,
        "layers": made.layout.layers,
        "step": made.seconds,
        "gain": lines.gain(made),
        "recompute": str(made.recompute),
        "slowest_stage": made.slowest,
        "ranks": made.rank_bytes,
    }


def lay_out(
    line: LineVariants,
    args: Any,
    own: str,
    room: float | None,
    *,
    search: bool = True,
    tries_recompute: bool = True,
    costs: Sequence[str] = (),
) -> LaidOut:
    """What other layouts would gain on ``line``, which trains under the schedule ``own``.

    Args:
        args: of the line, validated, with their vocabulary.
        room: bytes that a rank has for everything; None: as much as it takes.
        search: as of `compare_layouts`.
        tries_recompute: whether other layers may be run again than the line says.
        costs: as of `written_for`.

    Raises:
        ValueError: the line cannot be trained as it stands.
    """
    works = [work_of(args, line.config)]
    if tries_recompute:
        _, *others = recompute_of_line(line, args)
        works += [work_of(with_recompute(args, option), line.config) for option in others]
    lines = compare_layouts(
        works,
        own_layout(args, own),
        rule_of(args),
        room,
        permits=permits_of(line),
        search=search,
    )
    return _written(lines, line, costs)


def _written(lines: Lines, line: LineVariants, costs: Sequence[str]) -> LaidOut:
    written = (written_for(line.args, lines.own, made, costs) for made in lines.others.values())
    return LaidOut(lines, tuple(written))


def with_plan(
    made: LaidOut, line: LineVariants, args: Any, plan: Plan, costs: Sequence[str] = ()
) -> LaidOut:
    """``made``, and what ``plan`` has found for ``line`` with the layers where it lays them:
    searches, for instance, and what is made again or leaves for the host.

    ``args``, ``costs``: as of `lay_out`.
    """
    beside = work_of(args, line.config).seconds_beside
    rows = []
    for candidate in plan.recommendable:
        model, problem = candidate.variant.model, candidate.variant.problem
        if model is None:
            continue
        seconds = candidate.step + max(map(beside, model))
        if seconds < made.lines.ours.seconds:
            validated, _ = line.validated(candidate.schedule, candidate.method)
            layout = Layout(tuple(layers_of_stages(validated, problem.placement)))
            work = work_of_stages(problem.costs)
            rows.append(Evaluated(layout, candidate, seconds, work, made.lines.own.recompute))
    return _written(made.lines.beside(rows), line, costs) if rows else made
