"""Launch command on half of its pipeline ranks, with twice the data parallelism."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_ext.adapter.layers import (
    SEGMENT_END,
    layers_of_stages,
    layout_of,
    pattern_segments,
    prediction_depths,
)
from megatron_ext.compile.registry import choose
from megatron_ext.launch_planner.alternatives.written import CHUNKS_FLAG, alternative_of
from megatron_ext.launch_planner.parsed_launch import ParsedLaunch
from megatron_ext.launch_planner.variants import LineVariants, chunks_of
from megatron_ext.planner.candidate import Candidate, VocabMethod
from megatron_ext.planner.figures import flags_of
from megatron_ext.planner.half_pipeline import Division, of_half_limit
from megatron_ext.planner.planner import make_plan
from megatron_ext.planner.verdict import Alternative, Written, is_stock
from megatron_ext.schedule.limit import parse_limit

# Arguments that divide the layers over ranks and stages.
_DIVIDING = (
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "hybrid_layer_pattern",
)


def half_of_launch(parsed: ParsedLaunch) -> list[Alternative]:
    """Return the alternatives on half of the pipeline ranks that no other beats in both time and
    memory.

    Raises:
        ValueError: there is no half, or Megatron refuses it.
    """
    args, line = parsed.validated, parsed.variants
    if not line.config.costs.is_estimate:
        raise ValueError(
            "--half-pipeline: the given costs are those of the command's own stages, and do not "
            "tell those of half its pipeline: drop --costs and --pipeline-costs, or give a file "
            "that --pipeline-costs profile wrote, which has costs per layer type"
        )
    copies = args.data_parallel_size
    microbatches = args.global_batch_size // (args.micro_batch_size * copies)
    whole = Division(args.pipeline_model_parallel_size, copies, microbatches)
    half = whole.halved()
    of_half = on_half(line, args, whole)
    validated, _ = of_half.validated(str(line.own), VocabMethod.NAIVE)  # Megatron's refusal alone

    def write(made: Candidate) -> Written:
        rewritten = of_half.rewritten(made.schedule).args
        dropped, added = _differences(line.args, rewritten)
        if not is_stock(made):
            return Written((*added, *flags_of(made), *parsed.costs), dropped)
        chunks = made.report.vpp
        words = () if chunks == chunks_of(rewritten) else (CHUNKS_FLAG, str(chunks))
        return Written((*added, *words), dropped)

    return [
        replace(alternative_of(validated, made, partial(write, made)), division=str(half))
        for made in make_plan(of_half.variant, parsed.room, may_offload=True).front
    ]


def on_half(line: LineVariants, validated: Any, whole: Division) -> LineVariants:
    """Return ``line`` with each two successive stages as one.

    ``validated``: its arguments.
    """
    args = copy.deepcopy(line.args)
    assert line.own is not None
    choice = choose(line.own)
    placement, of_half = choice.place(whole.ranks), choice.place(whole.ranks // 2)
    args.pipeline_model_parallel_size = whole.ranks // 2
    if args.num_layers_per_virtual_pipeline_stage is not None:
        args.num_layers_per_virtual_pipeline_stage *= 2
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is not None:
        if SEGMENT_END in pattern:
            main, slash, depths = pattern.partition("/")
            segments = pattern_segments(main)
            pairs = zip(segments[::2], segments[1::2], strict=True)
            args.hybrid_layer_pattern = SEGMENT_END.join(map("".join, pairs)) + slash + depths
    else:
        counts = layers_of_stages(validated, placement)
        joined = [sum(pair) for pair in zip(counts[::2], counts[1::2], strict=True)]
        if args.pipeline_model_parallel_layout is not None:
            layout = layout_of(joined, prediction_depths(validated))
            args.pipeline_model_parallel_layout = layout
        for name, rank in (
            ("decoder_first_pipeline_num_layers", 0),
            ("decoder_last_pipeline_num_layers", -1),
        ):
            if getattr(args, name) is not None:
                setattr(args, name, sum(joined[stage] for stage in of_half.stages_of[rank]))
    config = line.config
    if config.memory_limit is not None:
        limit = parse_limit(config.memory_limit, whole.ranks, whole.microbatches)
        config = replace(config, memory_limit=of_half_limit(limit).written)
    return replace(line, args=args, config=config)


def _differences(before: Any, after: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the flags of `_DIVIDING` that only ``before`` has, and the words of those to which
    ``after`` gives another value."""
    dropped: list[str] = []
    words: list[str] = []
    for name in _DIVIDING:
        value = getattr(after, name, None)
        if value == getattr(before, name, None):
            continue
        flag = f"--{name.replace('_', '-')}"
        if value is None:
            dropped.append(flag)
        else:
            words += [flag, str(value)]
    return tuple(dropped), tuple(words)
