"""Split of Megatron's layers over a schedule's stages.

Megatron has several ways to say which layers are on which stage: equal parts, numbers for the first
and last stage, a layout, a hybrid model's pattern. A schedule needs the answer for its own stages,
in the order of the model. Here every form becomes layers by stage, and layers by stage become
Megatron's text of a layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ext.adapter.layout_arguments import ENDS, ENDS_IN_CONFIGS
from megatron_ext.base.words import counted
from megatron_ext.schedule.placement import Placement

SEGMENT_END = "|"  # separates segments in a hybrid model's pattern
_BEFORE_DEPTHS = "/"  # separates the main layers from those of multi-token prediction in a pattern


def layers_of_stages(settings: Any, placement: Placement) -> list[int]:
    """Return the number of transformer layers of each stage, as Megatron's options split them.

    - ``pipeline_model_parallel_layout``: its i-th segment is stage i.
    - A hybrid model's pattern: its i-th segment is stage i.
    - ``account_for_{embedding,loss}_in_pipeline_split``: each counts as a layer of its stage.
    - The options for the first and the last "pipeline stage" count the layers of the first and the
      last rank, split over the rank's chunks, if the placement is Megatron's own (linear or
      interleaved). Otherwise they count the layers of the first and the last stage.

    Args:
        settings: Megatron's parsed arguments, or a TransformerConfig not yet initialised.

    Raises:
        ValueError: the layers cannot be split evenly; the message names a layout that works.
    """
    if settings.pipeline_model_parallel_layout is not None:
        layout = settings.pipeline_model_parallel_layout
        segments = PipelineParallelLayerLayout.parse_str_to_list(layout)
        return [segment.count(LayerType.decoder) for segment in segments]
    if pattern := getattr(settings, "hybrid_layer_pattern", None):
        segments = pattern_segments(pattern)
        if len(segments) == placement.stages:
            return [len(segment) for segment in segments]
    stages = placement.stages
    given = _given_layers(settings, placement)
    embedding = int(settings.account_for_embedding_in_pipeline_split)
    loss = int(settings.account_for_loss_in_pipeline_split)
    rest = settings.num_layers - sum(given.values()) + embedding + loss
    others = stages - len(given)
    per_stage, more = divmod(rest, others) if others else (0, rest)
    if more or per_stage < max(embedding, loss):
        uneven = "".join(f", stage {stage} has {layers}" for stage, layers in given.items())
        uneven += ", the embedding counts as one" * embedding + ", the loss counts as one" * loss
        raise ValueError(
            f"{settings.num_layers} layers cannot be split evenly over {stages} stages{uneven}; "
            f"give each stage's layers in a layout: --pipeline-model-parallel-layout "
            f"'{even_layout_text(settings.num_layers, stages, prediction_depths(settings))}'"
        )
    layers = [given.get(stage, per_stage) for stage in range(stages)]
    layers[0] -= embedding
    layers[-1] -= loss
    return layers


def is_stock_placement(placement: Placement) -> bool:
    """Return whether ``placement`` is Megatron's own: linear, or interleaved (a loop)."""
    return placement.rank_of == tuple(range(placement.ranks)) * placement.chunks


def pattern_segments(pattern: str) -> list[str]:
    """Return the pipeline segments of a hybrid model's ``pattern``, which has one symbol per layer.

    For example, ``M*|M-`` has the segments ``M*`` and ``M-``.
    """
    return pattern.partition(_BEFORE_DEPTHS)[0].split(SEGMENT_END)


def segments_of_stages(pattern: str, placement: Placement, schedule: str) -> list[str]:
    """Return the segment of a hybrid model's ``pattern`` for each stage.

    A pattern without separators is split evenly.

    Raises:
        ValueError: the number of segments is not the number of stages of ``schedule``.
    """
    segments = pattern_segments(pattern)
    stages = placement.stages
    layers = "".join(segments)
    ends = [0, *accumulate(even_layer_counts(len(layers), stages))]
    even = [layers[start:end] for start, end in pairwise(ends)]
    if len(segments) == 1 and len(layers) % stages == 0:
        return even
    if len(segments) != stages:
        raise ValueError(
            f"the hybrid layer pattern {pattern} has {counted(len(segments), 'pipeline segment')}, "
            f"and schedule {schedule} has {stages} stages on {placement.ranks} pipeline ranks: "
            f"give the pattern {stages} segments, as in "
            f"--hybrid-layer-pattern '{SEGMENT_END.join(even)}'"
        )
    return segments


def stages_of_layout(layout: Any) -> int:
    """Return the number of stages of the pipeline ``layout``.

    ``layout`` is a text, a list with an entry for each stage, or Megatron's object.
    """
    return len(_segments_of(layout))


def _segments_of(layout: Any) -> list[Any]:
    entries = getattr(layout, "input_data", layout)
    if isinstance(entries, str):
        return list(PipelineParallelLayerLayout.parse_str_to_list(entries))
    return list(entries)


def _given_layers(settings: Any, placement: Placement) -> dict[int, int]:
    """Return, by stage, the numbers of layers that options set for the first and last stages.

    The options are Megatron's.
    """
    given = {}
    for end, alternatives in zip((0, -1), zip(ENDS_IN_CONFIGS, ENDS, strict=True), strict=True):
        values: list[int | None] = [getattr(settings, name, None) for name in alternatives]
        layers = next((value for value in values if value is not None), None)
        if layers is None:
            continue
        stages = placement.stages_of[end] if is_stock_placement(placement) else (end,)
        for stage in stages:
            given[stage % placement.stages] = layers // len(stages)
    return given


def prediction_depths(settings: Any) -> int:
    """Return the number of layers of multi-token prediction.

    Each layer predicts one token further than the layer before it.
    """
    return settings.mtp_num_layers or 0


def depths_of_stages(settings: Any) -> list[int] | None:
    """Return the number of multi-token prediction layers on each stage under ``settings``.

    None means that there is no layout: all these layers are on the last stage.
    """
    layout = getattr(settings, "pipeline_model_parallel_layout", None)
    if layout is None:
        return None
    return [segment.count(LayerType.mtp) for segment in _segments_of(layout)]


def refuse_prediction_on_first_rank(settings: Any, placement: Placement) -> None:
    """Raise ValueError if multi-token prediction is on the first rank, but not on the first stage.

    Only Megatron's own placements are checked: under its interleaved schedule the first rank has
    several stages. On that rank Megatron initialises only the first stage's embedding and sums only
    its gradients, so the copy of multi-token prediction would stay zero.
    """
    if not is_stock_placement(placement):
        return
    depths = depths_of_stages(settings) or []
    for stage, (count, rank) in enumerate(zip(depths, placement.rank_of, strict=False)):
        if count and stage > 0 and rank == 0:
            raise ValueError(
                f"--pipeline-model-parallel-layout {settings.pipeline_model_parallel_layout}: "
                "multi-token prediction is on the first pipeline rank, where Megatron neither "
                "initialises its copy of the embedding nor sums its gradients: move the m's to the "
                "last segment, or take a V, such as zb-v"
            )


def layout_of(layers: Sequence[int], depths: int) -> str:
    """Return Megatron's text of a layout with ``layers`` per stage, such as ``Ett|tt|ttmL``.

    ``depths`` multi-token prediction layers (``m``) are on the last stage.
    """
    return "E" + "|".join("t" * count for count in layers) + "m" * depths + "L"


def even_layout_text(layers: int, stages: int, depths: int) -> str:
    """Return Megatron's text of the layout that splits ``layers`` over ``stages`` most evenly."""
    return layout_of(even_layer_counts(layers, stages), depths)


def even_layer_counts(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage in the most even split.

    The first stages may have one layer more than the last ones.
    """
    per_stage, more = divmod(layers, stages)
    return [per_stage + (stage < more) for stage in range(stages)]
