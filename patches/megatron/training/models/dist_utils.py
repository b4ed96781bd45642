"""Equal initial embeddings on a rank with both copies.

Megatron zeroes the last stage's copy (a tied output layer's, or multi-token prediction's) and sums
both over the embedding group, which has one rank here.

Not patched: the builders that call this, and how a chunk is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.adapter.tied import equalize_copies
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that makes a tied embedding's two copies on one rank start equal."""
    return (
        wrap(
            "megatron.training.models.dist_utils:build_virtual_pipeline_stages",
            copy_tied_weight,
            reason="a V has both copies of the embedding on one rank: they start equal",
            signature="(build_model_func, pg_collection, vp_size, model_type=<ModelType."
            "encoder_or_decoder: 1>)",
        ),
    )


def copy_tied_weight(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model = original(*args, **kwargs)
    equalize_copies(model)
    return model
