"""Copies of an embedding on a V or wave, whose first and last stage are on one rank.

The last stage has a copy of the first stage's embedding if the output layer is tied to it, or if
multi-token prediction there looks up tokens. If multi-token prediction is on an earlier stage, that
has a copy too, on another rank, and Megatron sums the gradients over a group of both ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from megatron_ext.adapter.layers import depths_of_stages
from megatron_ext.adapter.model_parts import language_model, predicts_further
from megatron_ext.adapter.parity.digest import bits_of
from megatron_ext.adapter.programs import gather
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.config import PipelineConfig
from megatron_ext.schedule.placement import Placement


def tied_weights(
    model: Sequence[torch.nn.Module],
) -> tuple[torch.nn.Parameter, torch.nn.Parameter] | None:
    """Return the first and the last stage's copy of the embedding, among the chunks of this rank.

    None is returned if the last stage has no copy, if this rank lacks one of the two stages, or if
    Megatron does not know the model's embedding (it checks ``pre_process`` first).
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
    if not (is_tied or getattr(last, "mtp_process", False)):
        return None
    return first.shared_embedding_or_output_weight(), last.shared_embedding_or_output_weight()


def equalize_copies(model: Sequence[torch.nn.Module]) -> None:
    """Copy the first stage's embedding to all its copies.

    If multi-token prediction is on a rank of its own, Megatron initialises its copy from the last
    chunk of the first stage's rank, which may be another stage's. Here that copy gets the first
    stage's table, by a collective over the embedding group.
    """
    with torch.no_grad():
        for chunk, table in _shared_tables(model):
            if not chunk.pre_process:
                table.zero_()
            table.data = table.data.cuda()
            dist.all_reduce(table.data, group=chunk.embd_group)
        tied = tied_weights(model)
        if tied is not None:
            first, last = tied
            last.copy_(first)


def _shared_tables(
    model: Sequence[torch.nn.Module],
) -> Iterator[tuple[Any, torch.nn.Parameter]]:
    """Yield the chunks of this rank that look up tokens, with their embedding tables.

    Nothing is yielded unless two ranks share the embedding.
    """
    for chunk in model:
        language: Any = language_model(chunk)
        looks_up = getattr(language, "pre_process", False) or predicts_further(chunk)
        group = getattr(language, "embd_group", None)
        if looks_up and group is not None and group.size() > 1:
            yield language, language.shared_embedding_or_output_weight()


def refuse_different_copies(pipeline: dist.ProcessGroup, model: Sequence[torch.nn.Module]) -> None:
    """Raise ValueError if copies of the embedding on the ranks of ``pipeline`` differ.

    Collective over ``pipeline``.
    """
    tables = [*(tied_weights(model) or ()), *(table for _, table in _shared_tables(model))]
    sums = {_checksum(table) for table in tables}
    if len(set().union(*gather(pipeline, sums))) > 1:
        raise ValueError(
            "the pipeline's copies of the embedding differ: a model built or loaded without "
            "Megatron's own functions starts with different copies; copy "
            "model[0].shared_embedding_or_output_weight() of the last pipeline rank to "
            "model[-1]'s on that rank, and to the embedding of multi-token prediction on any "
            "other rank"
        )


def _refuse_copy_without_group(
    pipeline: dist.ProcessGroup, model: Sequence[torch.nn.Module], resolved: ResolvedSpec
) -> None:
    """Raise ValueError if a copy of the embedding is not in one group with the first stage's rank.

    The copy is that of multi-token prediction on this rank. Megatron would not sum the gradients of
    the two copies, and they would silently diverge.
    """
    placement = resolved.place(pipeline.size())
    first = dist.get_process_group_ranks(pipeline)[placement.rank_of[0]]
    for chunk in model:
        group = getattr(language_model(chunk), "embd_group", None)
        ranks = [] if group is None else dist.get_process_group_ranks(group)
        if predicts_further(chunk) and dist.get_rank() != first and first not in ranks:
            raise ValueError(
                f"multi-token prediction on rank {dist.get_rank()} shares the embedding of rank "
                f"{first}, but the embedding group of its model has ranks {ranks}, so the "
                "gradients of the two copies would not be summed; set pg_collection.embd on both "
                "ranks to a group of the two, or let initialize_model_parallel make the group "
                "with the layout's get_embedding_ranks"
            )


class CopiedEmbeddingHooks(TrainingHooks):
    """Hooks that check that the embedding group includes the rank of multi-token prediction.

    Otherwise Megatron would not add the gradients of the embedding and of its copy.
    """

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        predicts = getattr(settings, "mtp_num_layers", None) not in (None, 0)
        return ours.schedule is not None and predicts

    @override
    def check_models(self, call: Call) -> None:
        _refuse_copy_without_group(call.pipeline, call.models, self._programs.resolved_spec)


class MovedFirstStageHooks(TrainingHooks):
    """Hooks that check that copies of the embedding are equal.

    The hooks are on if the first stage is not on the first rank.
    """

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return ours.schedule is not None and ours.resolved_spec.moves_first_stage

    @override
    def check_models(self, call: Call) -> None:
        refuse_different_copies(call.pipeline, call.models)


def _checksum(table: torch.Tensor) -> int:
    return int(bits_of(table).sum(dtype=torch.int64))


def embedding_ranks(settings: Any, placement: Placement) -> list[int]:
    """Return the pipeline ranks that have a copy of the embedding, under a V or wave schedule.

    They are the rank of the first and last stage, and that of multi-token prediction on an earlier
    stage. ``settings`` are Megatron's arguments or a TransformerConfig.
    """
    depths = depths_of_stages(settings) or []
    predicting = [stage for stage, count in enumerate(depths) if count]
    return list(dict.fromkeys(placement.rank_of[stage] for stage in (0, *predicting)))


def check_embedding_group(
    group: dist.ProcessGroup | None,
    pipeline: dist.ProcessGroup,
    resolved: ResolvedSpec,
    settings: Any,
) -> None:
    """Raise ValueError unless ``group`` has exactly the ranks with a copy of the embedding.

    A rank without a copy may be in no group. ``settings`` as in `embedding_ranks`.
    """
    if pipeline.size() == 1:
        return
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    pipeline_ranks = dist.get_process_group_ranks(pipeline)
    holders = [
        pipeline_ranks[rank] for rank in embedding_ranks(settings, resolved.place(pipeline.size()))
    ]
    is_missing = len(holders) > 1 and dist.get_rank() in holders and not {*holders} <= {*ranks}
    if is_missing or (dist.get_rank() in ranks and not {*ranks} <= {*holders}):
        raise ValueError(
            f"the embedding group has ranks {ranks}, but under schedule {resolved.spec} the "
            f"embedding lies on {sorted(holders)}: install the schedule before "
            "initialize_model_parallel makes the group, or set pg_collection.embd to a group of "
            "these ranks alone (and to None on the other ranks)"
        )
