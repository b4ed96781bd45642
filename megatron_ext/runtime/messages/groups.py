"""Process groups within pipelines, each made by its members alone.

Every rank of the world has to call torch.distributed.new_group for every group, member or not: the
next group's name is the number of groups before, and where the world is bound to a device (as
NCCL's is from torch 2.15 on, by default) the new communicator is split off the world's, which
wants all its ranks. A pipeline's channels would so cost each rank the number of pipelines times
their number of such calls. (``use_local_synchronization`` spares those who are no members, but
still counts: ranks that are members of different numbers of groups wait for one another under
different names.)

Here a group has a name that its members can tell without the others, and is a communicator of its
own. What torch's own groups are called does not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_ext.runtime.messages.nccl import communicator_options

NCCL = "nccl"


def make_device_groups[Key](
    pipeline: dist.ProcessGroup,
    members: Mapping[Key, Sequence[int]],
    device: torch.device,
    max_ctas: int | None,
) -> dict[Key, dist.ProcessGroup]:
    """`make_groups` for tensors of ``device``, with the backend that the world has for them.

    On NCCL they have the settings of the pipeline's own group (`communicator_options`), and at most
    ``max_ctas`` CTAs where those say nothing of it; None leaves it to NCCL.
    """
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    backend = backends[device.type]
    options = None
    if backend == NCCL:

        def options() -> Any:
            return communicator_options(pipeline._get_backend(device).options, max_ctas)

    return make_groups(pipeline, members, backend, options)


def make_groups[Key](
    pipeline: dist.ProcessGroup,
    members: Mapping[Key, Sequence[int]],
    backend: str,
    options: Callable[[], Any] | None = None,
) -> dict[Key, dist.ProcessGroup]:
    """A process group for each of ``members``, given as pipeline ranks; those of this rank.

    They have the pipeline's timeout, and each ``options`` of its own. A member's rank in its group
    is its place among the members.

    Collective over the members of each group: they call it with the same ``members``, in an order
    in which they can meet, as a backend may connect them at once.
    """
    global_ranks = dist.get_process_group_ranks(pipeline)
    timeout = pipeline._get_backend(pipeline._device_types[0]).options._timeout
    store = distributed_c10d._get_default_store()
    groups: dict[Key, dist.ProcessGroup] = {}
    for key, ranks_of_key in members.items():
        if pipeline.rank() not in ranks_of_key:
            continue
        ranks = [global_ranks[rank] for rank in ranks_of_key]
        name = f"megatron_ext/{backend}/{key}/{'-'.join(map(str, ranks))}"
        # Where a group meets nothing must be left of one before. Its members have all made it
        # equally often; the count lives as long as what is left, in the store.
        backend_options = None if options is None else options()
        if backend_options is not None:
            backend_options._timeout = timeout  # or torch warns of another
        number = store.add(f"{name}/made by {dist.get_rank()}", 1)
        with _not_split_off() as device:
            group, _ = distributed_c10d._new_process_group_helper(
                len(ranks),
                ranks.index(dist.get_rank()),
                ranks,
                backend,
                store,
                f"{name}/{number}",  # type: ignore[arg-type]
                backend_options,  # by position: its name has changed
                timeout=timeout,
                device_id=device,
                group_desc=f"megatron_ext {key}",
            )
        assert isinstance(group, dist.ProcessGroup)
        places = {rank: place for place, rank in enumerate(ranks)}
        distributed_c10d._world.pg_group_ranks[group] = places
        groups[key] = group
    return groups


@contextlib.contextmanager
def _not_split_off() -> Iterator[torch.device | None]:
    """Meanwhile the world is not bound to its device, which is yielded: torch would split the new
    communicator off the world's."""
    world = distributed_c10d._get_default_group()
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield device
    finally:
        world.bound_device_id = device
