"""Two copies of an embedding on one rank.

The last stage has a copy of the first stage's embedding if the output layer is tied to it, or if
multi-token prediction looks up tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from megatron_ext.adapter.programs import gather
from megatron_ext.compile.registry import ResolvedSpec


def tied_weights(
    model: Sequence[torch.nn.Module],
) -> tuple[torch.nn.Parameter, torch.nn.Parameter] | None:
    """Return the first and the last stage's copy of the embedding, among the chunks of this rank.

    Return None if the last stage has no copy, if this rank lacks either, or if the model has no
    embedding that Megatron knows: it checks ``pre_process`` first.
    """
    if len(model) < 2:
        return None
    try:
        first = get_attr_wrapped_model(model[0], "pre_process", return_model_obj=True)
        last = get_attr_wrapped_model(model[-1], "pre_process", return_model_obj=True)
    except RuntimeError:
        return None
    if not (first.pre_process and last.post_process):
        return None
    is_tied = getattr(last, "share_embeddings_and_output_weights", False)
    if not (is_tied or getattr(last.config, "mtp_num_layers", None)):
        return None
    return first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight()


def equalize_copies(model: Sequence[torch.nn.Module]) -> None:
    """Copy the first stage's embedding to the last stage's copy, if this rank has both."""
    tied = tied_weights(model)
    if tied is not None:
        first, last = tied
        with torch.no_grad():
            last.copy_(first)


def copies_differ(model: Sequence[torch.nn.Module]) -> bool:
    """Whether this rank has both copies and they are unequal."""
    tied = tied_weights(model)
    return tied is not None and not torch.equal(*tied)


def refuse_different_copies(pipeline: dist.ProcessGroup, model: Sequence[torch.nn.Module]) -> None:
    """Raise ValueError if a rank of ``pipeline`` has unequal copies. Collective over
    ``pipeline``."""
    if any(gather(pipeline, copies_differ(model))):
        raise ValueError(
            "the last pipeline rank holds both copies of the embedding, and they differ: a model "
            "built or loaded without Megatron's own functions starts with different copies; copy "
            "model[0].shared_embedding_or_output_weight() to model[-1]'s on that rank"
        )


def check_embedding_group(
    group: dist.ProcessGroup | None, pipeline: dist.ProcessGroup, resolved: ResolvedSpec
) -> None:
    """Raise ValueError if ``group`` has ranks without a copy of the embedding."""
    if group is None or pipeline.size() == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    if dist.get_rank() not in ranks:
        return
    rank_of = resolved.place(pipeline.size()).rank_of
    pipeline_ranks = dist.get_process_group_ranks(pipeline)
    holders = {pipeline_ranks[rank_of[0]], pipeline_ranks[rank_of[-1]]}
    if not set(ranks) <= holders:
        raise ValueError(
            f"the embedding group has ranks {ranks}, but under schedule {resolved.spec} the "
            f"embedding lies on {sorted(holders)}: install the schedule before "
            "initialize_model_parallel makes the group, or set pg_collection.embd to a group of "
            "that rank alone (and to None on the other ranks)"
        )
