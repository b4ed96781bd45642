"""How much memory the host has free, and what offload takes of it."""

from __future__ import annotations

import math
import socket
from collections import defaultdict
from pathlib import Path

import torch.distributed as dist

from megatron_ext.schedule.action import Action, tokens_of
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.program.memory import in_bytes, most_on_host

_GIB = 2**30


def available_bytes(root: Path = Path("/")) -> int:
    """What a process of this machine can still take, in bytes: of the machine, and of its control
    groups (version 2) where these allow less. ``root``: of the file system."""
    meminfo = (root / "proc/meminfo").read_text().splitlines()
    figures = {line.split(":")[0]: line.split()[1] for line in meminfo}
    free = [1024 * int(figures["MemAvailable"])]
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for line in groups:
        if not line.startswith("0::"):
            continue
        top = root / "sys/fs/cgroup"
        group = top / line[3:].strip("/")
        for folder in (group, *group.parents):
            free += _left_in(folder)
            if folder == top:
                break
    return min(free)


def _left_in(group: Path) -> list[int]:
    """What a control group's limit leaves, if it has one. Cached files can give way."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return []
    return [] if limit == "max" else [int(limit) - used + int(stat.get("inactive_file", 0))]


def buffer_sizes(row: tuple[Action, ...], costs: Costs) -> dict[tuple[int, Held], int]:
    """The bytes of each of a rank's host buffers, by stage and what it holds; none where ``costs``
    do not tell."""
    if costs.held_bytes is None:
        return {}
    amount, tokens = in_bytes(costs), max(tokens_of(action.microbatch) for action in row)
    return {
        (stage, held): math.ceil(amount(held, stage) * tokens) for stage, held in most_on_host(row)
    }


def planned_bytes(row: tuple[Action, ...], costs: Costs) -> int | None:
    """The bytes of all of a rank's host buffers, as far as ``costs`` tell."""
    if costs.held_bytes is None:
        return None
    sizes = buffer_sizes(row, costs)
    return sum(count * sizes[key] for key, count in most_on_host(row).items())


def check_host_memory(row: tuple[Action, ...], costs: Costs) -> str:
    """What offload will take of each host, in a sentence. Collective over the world.

    Raises:
        ValueError: on every rank, where a host has less.
    """
    planned = planned_bytes(row, costs)
    if planned is None:
        return "offload: host memory is not known before the first step, as the costs have no bytes"
    reports: list[tuple[str, float, int]] = [("", 0.0, 0)] * dist.get_world_size()
    dist.all_gather_object(reports, (socket.gethostname(), planned, available_bytes()))
    ranks: dict[str, list[float]] = defaultdict(list)
    free: dict[str, int] = {}
    for host, bytes_of_rank, available in reports:
        ranks[host].append(bytes_of_rank)
        free[host] = min(available, free.get(host, available))
    for host, of_ranks in ranks.items():
        if sum(of_ranks) > free[host]:
            raise ValueError(
                short_of_memory(
                    f"{host}: {len(of_ranks)} ranks need {sum(of_ranks) / _GIB:.3g}", free[host]
                )
            )
    host = max(ranks, key=lambda host: sum(ranks[host]))
    return (
        f"offload: up to {max(figure for _, figure, _ in reports) / _GIB:.3g} GiB of host memory a "
        f"rank, {sum(ranks[host]) / _GIB:.3g} GiB on {host}, which has {free[host] / _GIB:.3g} GiB "
        f"available"
    )


def short_of_memory(who_needs: str, available: int) -> str:
    """The text of an error; ``who_needs`` is its beginning, up to the number of GiB."""
    return (
        f"{who_needs} GiB of host memory for offloaded activations, but only "
        f"{available / _GIB:.3g} GiB are available: offload less (--pipeline-activation-offload "
        f"half, or fit with a --pipeline-memory-limit), recompute some modules, or give the job "
        f"more memory"
    )
