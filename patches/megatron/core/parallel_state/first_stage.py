"""Rank of the first stage as `parallel_state` reports it, and ranks that share the embedding's
weight.

The ranks of the embedding groups are overridden for every caller: pretrain_gpt.py passes a function
of its own, which assumes that the first and the last stage are on the first and the last rank.
Whether multi-token prediction has a rank of its own is read from the arguments of Megatron's
training loop.

Not patched: `is_pipeline_last_stage`; `is_rank_in_embedding_group` (it calls the others).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from megatron_ext.adapter.tied import embedding_ranks
from megatron_ext.adapter.training_globals import training_global
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap

_STATE = "megatron.core.parallel_state"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches by which `parallel_state` finds the first stage where it is placed.

    The groups are also created with the schedule's number of virtual stages.
    """
    resolved = config.resolved_spec

    def is_first(
        original: Callable[..., bool], ignore_virtual: bool = True, vp_stage: int | None = None
    ) -> bool:
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        if ranks == 1:
            return original(ignore_virtual, vp_stage)
        if not ignore_virtual:
            assert vp_stage is not None, "vp_stage must be passed if virtual pipeline is enabled"
            if vp_stage != 0:
                return False
        first: int = resolved.place(ranks).rank_of[0]
        return parallel_state.get_pipeline_model_parallel_rank() == first

    def initialize(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(original).bind(*args, **kwargs)
        call.apply_defaults()
        ranks = call.arguments["pipeline_model_parallel_size"]
        if ranks > 1:
            placement = resolved.place(ranks)
            given = call.arguments["virtual_pipeline_model_parallel_size"]
            if given not in (None, placement.chunks):
                raise ValueError(
                    f"virtual_pipeline_model_parallel_size is {given}, but schedule "
                    f"{resolved.spec} has {placement.chunks} virtual stages a rank: give that "
                    "number, or none"
                )
            call.arguments["virtual_pipeline_model_parallel_size"] = placement.chunks
            first = placement.rank_of[0]
            if first != 0:
                copies = embedding_ranks(training_global("_GLOBAL_ARGS"), placement)
                call.arguments["get_embedding_ranks"] = lambda pipeline: [
                    pipeline[rank] for rank in copies
                ]
                call.arguments["get_position_embedding_ranks"] = lambda pipeline: [pipeline[first]]
        original(*call.args, **call.kwargs)

    return (
        wrap(
            f"{_STATE}:is_pipeline_first_stage",
            is_first,
            reason="the schedule's placement says which rank has the first stage",
            signature="(ignore_virtual=True, vp_stage=None)",
        ),
        wrap(
            f"{_STATE}:initialize_model_parallel",
            initialize,
            reason="the embedding group has the ranks of the stages with an embedding",
        ),
    )
