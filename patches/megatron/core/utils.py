"""A rank that holds both the first and the last stage needs the whole of a batch.

Stock gives a first stage the tokens and a last one the labels; a rank that is both would get the
tokens only. Where a batch has both ends, as without a pipeline, it is passed on whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """The patch for batches on a rank with both ends."""
    return (
        wrap(
            "megatron.core.utils:get_batch_on_this_tp_rank",
            whole_batch,
            reason="a rank with the first and the last stage needs tokens and labels",
        ),
    )


def whole_batch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``original`` as if there were no pipeline, where this rank has both its ends."""
    if kwargs.get("is_pipeline_first_stage") and kwargs.get("is_pipeline_last_stage"):
        kwargs["pipeline_model_parallel_size"] = 1
    return original(*args, **kwargs)
