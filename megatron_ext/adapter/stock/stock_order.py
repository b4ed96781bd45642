"""Order of passes in Megatron's own pipeline functions, as one of our families.

An observed step is compared with a prediction, and for that its order must be known: 1F1B, or the
interleaved schedule with its group size. If passes cannot be observed, as on a single rank, the
reason is given (`why_unseen`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules


def family_of(function: Callable[..., Any], config: Any, ranks: int, chunks: int) -> str:
    """Return the spec of our schedule that has the order of passes of Megatron's ``function``.

    ``config`` is Megatron's config of the model.
    """
    if function is schedules.forward_backward_pipelining_without_interleaving:
        return "1f1b"
    group = config.microbatch_group_size_per_vp_stage
    option = "" if group in (None, ranks) else f",group={group}"
    return f"interleaved:vpp={chunks}{option}"


def why_unseen(ranks: int, settings: Any) -> str | None:
    """Return why passes of Megatron's own step cannot be observed; None if they can.

    ``ranks`` is the number of pipeline ranks; ``settings`` are Megatron's parsed arguments or a
    TransformerConfig.
    """
    if ranks == 1:
        return (
            "the model runs on one pipeline rank, where there is no pipeline and no bubble: set "
            "--pipeline-model-parallel-size, or drop the flag"
        )
    if settings.overlap_moe_expert_parallel_comm:
        return (
            "with --overlap-moe-expert-parallel-comm Megatron runs the forward pass of one "
            "microbatch within the backward pass of another, layer by layer: to see its bubble, "
            "train some iterations without"
        )
    if settings.cuda_graph_impl == "full_iteration":
        return (
            "with --cuda-graph-impl full_iteration a step is one CUDA graph, whose passes are "
            "not called one by one: to see its bubble, train some iterations without"
        )
    return None
