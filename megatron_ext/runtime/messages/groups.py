"""Process groups within pipelines, each created by its members alone.

torch.distributed.new_group must be called by every rank of the world for every group, so the
channels of all pipelines would cost each rank a call per channel per pipeline. Here a group's name
is derived by its members alone, and the group has its own communicator (`make_groups`). The names
of torch's own groups do not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
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
    """Create groups (`make_groups`) for tensors on ``device``, with the world's backend.

    On NCCL they have the settings of the pipeline's own group (`communicator_options`), and at most
    ``max_ctas`` CTAs unless those settings say otherwise; None leaves the number to NCCL.
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
    """Create a process group for each of ``members``, lists of pipeline ranks.

    Return this rank's groups. torch's new_group names a group by the number of groups before it,
    and if the world is bound to a device (NCCL's default from torch 2.15 on) it splits the
    communicator off the world's, which needs all ranks. (``use_local_synchronization`` spares
    non-members but still counts: ranks that are members of different numbers of groups would wait
    for each other under different names.)

    The groups have the pipeline's timeout, and each has ``options`` of its own. A member's rank in
    its group is its place among the members.

    Collective over the members of each group: they pass the same ``members``, in an order without
    deadlock, as a backend may connect the members at once.
    """
    global_ranks = dist.get_process_group_ranks(pipeline)
    timeout = timeout_of(pipeline)
    store = distributed_c10d._get_default_store()
    groups: dict[Key, dist.ProcessGroup] = {}
    for key, ranks_of_key in members.items():
        if pipeline.rank() not in ranks_of_key:
            continue
        ranks = [global_ranks[rank] for rank in ranks_of_key]
        name = f"megatron_ext/{backend}/{key}/{'-'.join(map(str, ranks))}"
        # The group's name contains a count, so that a new group does not meet keys of an earlier
        # group. All members have created the group equally often, and the count lives in the store,
        # as long as those keys do.
        backend_options = None if options is None else options()
        if backend_options is not None:
            backend_options._timeout = timeout  # otherwise torch warns that two timeouts differ
        number = store.add(f"{name}/made by {dist.get_rank()}", 1)
        with _not_split_off() as device:
            group, _ = distributed_c10d._new_process_group_helper(
                len(ranks),
                ranks.index(dist.get_rank()),
                ranks,
                backend,
                store,
                f"{name}/{number}",  # type: ignore[arg-type]
                backend_options,  # passed by position, as the name of this argument has changed
                timeout=timeout,
                device_id=device,
                group_desc=f"megatron_ext {key}",
            )
        assert isinstance(group, dist.ProcessGroup)
        places = {rank: place for place, rank in enumerate(ranks)}
        distributed_c10d._world.pg_group_ranks[group] = places
        groups[key] = group
    return groups


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of collectives of torch's process ``group``."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


@contextlib.contextmanager
def _not_split_off() -> Iterator[torch.device | None]:
    """Context in which torch's world is not bound to its device; the context yields that device.

    Otherwise torch would split a new communicator off the world's, which needs all ranks.
    """
    world = distributed_c10d._get_default_group()
    device = world.bound_device_id
    world.bound_device_id = None
    try:
        yield device
    finally:
        world.bound_device_id = device
