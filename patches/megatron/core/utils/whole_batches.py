"""Whole batches for a rank with both the first and the last stage.

Megatron gives a first stage the tokens and a last one the labels; a rank with both would get the
tokens only. Such a rank gets the whole batch, as without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap

_SIGNATURE = (
    "(batch, {}, is_hybrid_cp, create_attention_mask_in_dataloader, broadcast_src_rank, "
    "broadcast_group, cp_size, tp_rank, micro_batch_size, seq_length, mtp_on_this_rank, "
    "pipeline_model_parallel_size=1, is_pipeline_first_stage=False, is_pipeline_last_stage=False)"
)


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that gives a rank with the first and the last stage tokens and labels."""
    return (
        wrap(
            "megatron.core.utils:get_batch_on_this_tp_rank",
            whole_batch,
            reason="a rank with the first and the last stage needs tokens and labels",
            signature=[_SIGNATURE.format(name) for name in ("is_sft", "has_cu_seqlens")],
        ),
    )


def whole_batch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``original`` as without a pipeline if this rank has both the first and the last stage."""
    if kwargs.get("is_pipeline_first_stage") and kwargs.get("is_pipeline_last_stage"):
        kwargs["pipeline_model_parallel_size"] = 1
    return original(*args, **kwargs)
