"""Pipeline segments of hybrid models: the i-th segment is stage i, on the rank of its placement.

On linear and interleaved placements Megatron has the same order but lacks a check: if there are
more segments than stages, Megatron builds only the first segments and trains a smaller model.

Not patched: `HybridModel`, which imports the patched function in its __init__ and uses its result
(the layers, and the number of the first layer); `HybridStack`, which numbers its layers from that
number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_layer_allocation import validate_segment_layers

from megatron_ext.adapter.layers import SEGMENT_END, is_stock_placement, segments_of_stages
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that gives a chunk of a hybrid model the layers of its stage."""
    resolved = config.resolved_spec

    def select(
        original: Callable[..., tuple[list[str], int]],
        main_pattern: str,
        pp_group: dist.ProcessGroup | None,
        vp_stage: int | None,
        first_stage_layers: int | None = None,
        last_stage_layers: int | None = None,
        **groups: Any,
    ) -> tuple[list[str], int]:
        given = first_stage_layers, last_stage_layers
        if pp_group is None or pp_group.size() == 1:
            return original(main_pattern, pp_group, vp_stage, *given, **groups)
        placement = resolved.place(pp_group.size())
        is_divided = SEGMENT_END in main_pattern
        # Megatron itself splits a pattern without separators over the ranks.
        if placement.chunks == 1 and not is_divided:
            return original(main_pattern, pp_group, vp_stage, *given, **groups)
        if given != (None, None):
            raise ValueError(
                "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage "
                f"({given[0]} and {given[1]}) do not go with schedule {resolved.spec} and the "
                f"hybrid layer pattern {main_pattern}: mark the ends of stages in the pattern by "
                f"{SEGMENT_END} alone"
            )
        segments = segments_of_stages(main_pattern, placement, resolved.spec)
        if placement.chunks > 1 and vp_stage is None:
            raise ValueError(
                f"schedule {resolved.spec} has {placement.chunks} stages on each rank, and a "
                "HybridModel is built without vp_stage: build one model for each stage, with its "
                "vp_stage"
            )
        if is_stock_placement(placement):
            return original(SEGMENT_END.join(segments), pp_group, vp_stage, **groups)
        stage = placement.stages_of[pp_group.rank()][vp_stage or 0]
        return validate_segment_layers(segments[stage]), sum(map(len, segments[:stage]))

    return (
        wrap(
            "megatron.core.models.hybrid.hybrid_layer_allocation:select_pipeline_segment",
            select,
            reason="stage i is the i-th segment of a hybrid model's pattern, on any pipeline rank",
            signature=(
                "(main_pattern, pp_group, vp_stage, first_stage_layers=None, "
                "last_stage_layers=None)",
                "(main_pattern, pp_group, vp_stage, first_stage_layers=None, "
                "last_stage_layers=None, tp_group=None, dp_cp_group=None)",
            ),
        ),
    )
