"""Process groups within pipelines."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch.distributed as dist


def make_groups[Key](
    pipeline: dist.ProcessGroup,
    members: Mapping[Key, Collection[int]],
    backend: str | None = None,
) -> dict[Key, dist.ProcessGroup]:
    """A process group for each of ``members``, given as pipeline ranks; those of this rank.

    They have the pipeline's timeout, and ``backend``, or the world's.

    Collective over the world: every rank of every pipeline calls it with the same ``members``, in
    the same order.
    """
    mine = dist.get_process_group_ranks(pipeline)
    timeout = pipeline._get_backend(pipeline._device_types[0]).options._timeout
    groups: dict[Key, dist.ProcessGroup] = {}
    for ranks in _all_pipelines(mine):
        for key, members_of_key in members.items():
            group = dist.new_group(
                [ranks[member] for member in members_of_key], timeout=timeout, backend=backend
            )
            if ranks == mine and pipeline.rank() in members_of_key:
                assert isinstance(group, dist.ProcessGroup)
                groups[key] = group
    return groups


def _all_pipelines(mine: list[int]) -> list[list[int]]:
    """The global ranks of every pipeline in the world, in one order everywhere."""
    gathered: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    return sorted({tuple(ranks): ranks for ranks in gathered}.values())
