"""Stages that the arguments of a launch name, and arguments for another number of stages.

All arguments are as the command gives them, not validated.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ext.adapter.handled_settings.microbatch_groups import with_megatrons_group
from megatron_ext.adapter.layers import (
    SEGMENT_END,
    even_layer_counts,
    even_layout_text,
    layers_of_stages,
    pattern_segments,
    prediction_depths,
)
from megatron_ext.adapter.layout_arguments import (
    CHUNKS,
    ENDS,
    LAYERS_OF_CHUNK,
    LAYOUT,
    PATTERN,
    VIRTUAL_STAGES,
)
from megatron_ext.base.words import argument_flag
from megatron_ext.compile.registry import choose, options_of
from megatron_ext.schedule.placement import Placement


def names_stages(args: Any) -> bool:
    """Return whether ``args`` say how many chunks a rank has."""
    given = any(getattr(args, name) is not None for name in VIRTUAL_STAGES)
    return given or SEGMENT_END in (getattr(args, PATTERN, None) or "")


def chunks_of(args: Any) -> int:
    """Return the number of chunks (virtual stages) on a rank under ``args``.

    Raises:
        ValueError: the layout of the stages cannot be read.
    """
    ranks = args.pipeline_model_parallel_size
    layout, pattern = getattr(args, LAYOUT), getattr(args, PATTERN, None)
    chunks: int | None = getattr(args, CHUNKS)
    of_chunk = getattr(args, LAYERS_OF_CHUNK)
    if layout is not None:
        try:
            stages = PipelineParallelLayerLayout.parse_str_to_list(layout)
        except AssertionError as error:
            raise ValueError(f"{argument_flag(LAYOUT)}: Megatron asserts: {error}") from error
        chunks = len(stages) // ranks
    elif pattern is not None and SEGMENT_END in pattern:
        chunks = len(pattern_segments(pattern)) // ranks
    elif of_chunk is not None:
        chunks = args.num_layers // ranks // of_chunk
    return max(chunks or 1, 1)


def stock_schedule(args: Any) -> str:
    """Return Megatron's own schedule for ``args``, with their chunks and groups of microbatches."""
    chunks = chunks_of(args)
    name = "1f1b" if chunks == 1 else f"interleaved:vpp={chunks}"
    return with_megatrons_group(choose(name), args).spec


def with_chunks(args: Any, name: str) -> str:
    """Return the schedule ``name`` with the number of chunks of ``args``.

    The number is added if the schedule takes any number of chunks and ``name`` gives none.
    """
    chunks = chunks_of(args)
    if chunks > 1 and ":" not in name and "vpp" in options_of(name)[0]:
        return f"{name}:vpp={chunks}"
    return name


@dataclass(frozen=True)
class Rewritten:
    """Changes to Megatron's arguments of a launch command that a schedule needs.

    Attributes:
        args: arguments of the launch, not validated.
        dropped: Megatron's flags to remove from the command.
        added: words to append to the command.
    """

    args: Any
    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


def rewritten(args: Any, spec: str) -> Rewritten:
    """Return the launch of ``args`` with the stages that the schedule ``spec`` needs.

    If the number of stages differs, flags of virtual stages are dropped, and the layout is replaced
    by one that is as even as possible.
    """
    args = copy.deepcopy(args)
    placement = choose(spec).place(args.pipeline_model_parallel_size)
    if placement.stages == placement.ranks * chunks_of(args):
        return Rewritten(args)
    dropped = _taken_out(args, (CHUNKS, LAYERS_OF_CHUNK))
    if getattr(args, PATTERN, None) is not None:
        return Rewritten(args, dropped, _cut_pattern(args, placement.stages))
    had_layout = bool(args.pipeline_model_parallel_layout)
    args.pipeline_model_parallel_layout = None
    if not had_layout and _divides(args, placement):
        return Rewritten(args, dropped)
    dropped += _taken_out(args, ENDS)
    layout = even_layout_text(args.num_layers, placement.stages, prediction_depths(args))
    args.pipeline_model_parallel_layout = layout
    return Rewritten(args, dropped, (argument_flag(LAYOUT), layout))


def _taken_out(args: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Remove the arguments among ``names`` that are set in ``args``, and return their flags."""
    given = [name for name in names if getattr(args, name) is not None]
    for name in given:
        setattr(args, name, None)
    return tuple(map(argument_flag, given))


def _divides(args: Any, placement: Placement) -> bool:
    try:
        layers_of_stages(args, placement)
    except ValueError:
        return False
    return True


def _cut_pattern(args: Any, stages: int) -> tuple[str, ...]:
    """Cut the hybrid layer pattern of ``args`` into ``stages`` stages, and return the words for it.

    The cut is as even as possible; nothing is done if Megatron cuts the pattern so by itself.
    """
    pattern: str = args.hybrid_layer_pattern
    main, slash, depths = pattern.partition("/")
    layers = main.replace(SEGMENT_END, "")
    if SEGMENT_END not in pattern and len(layers) % stages == 0:
        return ()
    left = iter(layers)
    segments = ["".join(islice(left, count)) for count in even_layer_counts(len(layers), stages)]
    args.hybrid_layer_pattern = SEGMENT_END.join(segments) + slash + depths
    return argument_flag(PATTERN), args.hybrid_layer_pattern
