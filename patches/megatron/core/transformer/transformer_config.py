"""Default layout, virtual stages and groups of microbatches of a model, from the schedule.

Interleaved placements need no layout: Megatron splits the layers over its virtual stages itself.
Nor do hybrid models: their stages are in their pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.adapter.layers import (
    is_stock_placement,
    layers_of_stages,
    layout_of,
    prediction_depths,
)
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that sets virtual stages and default layout from the placement."""
    resolved = config.resolved_spec

    def place(original: Callable[..., None], model_config: Any) -> None:
        ranks = model_config.pipeline_model_parallel_size
        if ranks > 1 and model_config.pipeline_model_parallel_layout is None:
            placement = resolved.place(ranks)
            if model_config.is_hybrid_model or is_stock_placement(placement):
                if model_config.virtual_pipeline_model_parallel_size is None:
                    model_config.virtual_pipeline_model_parallel_size = placement.chunks
            else:
                layers = layers_of_stages(model_config, placement)
                layout = layout_of(layers, prediction_depths(model_config))
                model_config.pipeline_model_parallel_layout = layout
                # The layout replaces the following settings.
                model_config.num_layers_in_first_pipeline_stage = None
                model_config.num_layers_in_last_pipeline_stage = None
                model_config.account_for_embedding_in_pipeline_split = False
                model_config.account_for_loss_in_pipeline_split = False
        own_order = ranks > 1 and not is_stock_placement(resolved.place(ranks))
        if own_order and model_config.microbatch_group_size_per_vp_stage is None:
            # If this setting were None, verl would round the microbatches of a step up to whole
            # groups, which a V does not have.
            model_config.microbatch_group_size_per_vp_stage = 1
        original(model_config)

    return (
        wrap(
            "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
            place,
            reason="the schedule sets the model's virtual stages",
            signature="(self)",
        ),
    )
