"""Checkpoints of embeddings whose two copies are on one rank: one copy is saved.

Megatron chooses by a tensor's name which data-parallel rank saves it, and that rank marks all its
shards of that name. If one rank marks two, global rank 0 alone raises an error for overlapping
shards, and the other ranks wait for it.

Not patched: a checkpoint's contents, and which rank saves what; without data-parallel ranks
Megatron takes the embedding's copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch with which only one copy of a tied embedding is saved."""
    return (
        wrap(
            "megatron.core.dist_checkpointing.strategies.fully_parallel:"
            "distribute_main_replicas_with_precomputed_distribution",
            leave_one_copy,
            reason="a rank that has both copies of the embedding saves only one of them",
            signature="(sharded_state_dict, parallelization_group, precomputed_distribution)",
        ),
    )


def leave_one_copy(
    original: Callable[..., None], sharded_state_dict: Any, *args: Any, **kwargs: Any
) -> None:
    """Let ``original`` mark the shards to save, and unmark all but the first shard of each name."""
    original(sharded_state_dict, *args, **kwargs)
    saved = set()
    for shard in nested_values(sharded_state_dict):
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id):
            name = _sharded_tensor_shard_id(shard)
            if name in saved:
                shard.replica_id = 1
            saved.add(name)
