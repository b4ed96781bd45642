"""Layouts by stage: the i-th segment is stage i, on the rank of its placement.

Callers through `transformer_block` and `transformer_layer` pass the rank, but Megatron does not
pass it on to the layout, which would read it from `parallel_state`. `parallel_state` is empty if
the caller has groups of its own. A vision tower has no layout and one pipeline rank, but its config
is often a copy of the language model's, including the layout of a V.

Not patched: `from_str` and the parser (they call what is patched), the layout's own
`get_num_layers_to_build` and `get_layer_id_list` (they read what is patched),
`validate_layer_layout` (it checks the order of the layers, which stays, and that multi-token
prediction is on the last rank's last chunk, which is the last stage in any placement).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, expect, wrap

_TRANSFORMER = "megatron.core.transformer"
_LAYOUT = f"{_TRANSFORMER}.pipeline_parallel_layer_layout:PipelineParallelLayerLayout"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that put the i-th segment of a layout on the rank of stage i."""
    resolved = config.resolved_spec

    def lay_out(
        original: Callable[..., None],
        self: Any,
        layout: str | list[Any],
        pipeline_model_parallel_size: int,
    ) -> None:
        original(self, layout, pipeline_model_parallel_size)
        ranks = pipeline_model_parallel_size
        stages = ranks * self.virtual_pipeline_model_parallel_size
        placement = resolved.place(ranks)
        if stages != placement.stages:
            raise ValueError(
                f"the layout {layout} has {stages} stages, and schedule {resolved.spec} has "
                f"{placement.stages} on {ranks} pipeline ranks: give the layout "
                f"{placement.stages} segments"
            )
        segments = [self.layout[stage % ranks][stage // ranks] for stage in range(stages)]
        self.layout = [[segments[stage] for stage in of_rank] for of_rank in placement.stages_of]

    def layers_before(
        original: Callable[..., int],
        self: Any,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        stages_of = resolved.place(self.pipeline_model_parallel_size).stages_of
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        assert vp_stage is not None, "vp_stage must be passed if virtual pipeline is enabled"
        here = stages_of[pp_rank][vp_stage]
        return sum(
            segment.count(layer_type)
            for stages, segments in zip(stages_of, self.layout, strict=True)
            for stage, segment in zip(stages, segments, strict=True)
            if stage < here
        )

    def layers_here(
        original: Callable[..., int],
        model_config: Any,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        model_config = _without_others_layout(model_config)
        layout = model_config.pipeline_model_parallel_layout
        if layout is None or pp_rank is None:
            return original(model_config, vp_stage, pp_rank)
        return layout.layout[pp_rank][vp_stage].count(LayerType.decoder)

    def layers_before_here(
        original: Callable[..., int],
        model_config: Any,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        layout = _without_others_layout(model_config).pipeline_model_parallel_layout
        if layout is None or pp_rank is None:
            return original(model_config, vp_stage, pp_rank)
        return layout.get_layer_offset(LayerType.decoder, vp_stage, pp_rank)

    return (
        wrap(
            f"{_LAYOUT}.__init__",
            lay_out,
            reason="stage i is the i-th segment of a layout, on the rank that has stage i",
            signature="(self, layout, pipeline_model_parallel_size)",
        ),
        wrap(
            f"{_LAYOUT}.get_layer_offset",
            layers_before,
            reason="the number of a layer counts the layers of all earlier stages",
            signature="(self, layer_type=<LayerType.decoder: 4>, vp_stage=None, pp_rank=None)",
        ),
        wrap(
            f"{_TRANSFORMER}.transformer_block:get_num_layers_to_build",
            layers_here,
            reason="without global process groups the layout must be told the pipeline rank",
            signature="(config, vp_stage=None, pp_rank=None)",
        ),
        wrap(
            f"{_TRANSFORMER}.transformer_layer:get_transformer_layer_offset",
            layers_before_here,
            reason="without global process groups the layout must be told the pipeline rank",
            signature="(config, vp_stage=None, pp_rank=None)",
        ),
        expect(
            f"{_LAYOUT}.get_num_layers_to_build",
            reason="a rank's number of layers comes from the layout, arranged by the placement",
            signature="(self, layer_type=<LayerType.decoder: 4>, vp_stage=None, pp_rank=None)",
        ),
    )


def _without_others_layout(model_config: Any) -> Any:
    """Return ``model_config``, without a layout copied from another model.

    A model without a pipeline, such as a vision tower, may have a copied layout in its config.
    """
    if model_config.pipeline_model_parallel_size > 1:
        return model_config
    model_config = copy.copy(model_config)
    model_config.pipeline_model_parallel_layout = None
    return model_config
