"""How much memory the host has free, and what offload takes of it."""

from __future__ import annotations

import math
import socket
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_ext.runtime.store.leader import store_of_all
from megatron_ext.runtime.store.lost_store import losing_the_store
from megatron_ext.runtime.world import gather_from_all
from megatron_ext.schedule.action import Action, tokens_of
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.program.memory import in_bytes, most_on_host
from megatron_ext.schedule.words import bytes_text

# Estimates leave out small tensors, such as indices and statistics of norms. A buffer that is a
# little too small would have the whole first step copy to plain pages.
_ALLOWANCE = 17 / 16


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
        (stage, held): math.ceil(amount(held, stage) * tokens * _ALLOWANCE)
        for stage, held in most_on_host(row)
    }


def planned_bytes(row: tuple[Action, ...], costs: Costs) -> int | None:
    """The bytes of all of a rank's host buffers, as far as ``costs`` tell."""
    if costs.held_bytes is None:
        return None
    sizes = buffer_sizes(row, costs)
    return sum(count * sizes[key] for key, count in most_on_host(row).items())


class ShortOfHostMemory(ValueError):
    """A host whose ranks plan to take more than it has."""


class HostMemory:
    """Memory that offload plans to take of this rank's host, which other ranks share.

    All ranks tell their plans of the first program, and so know what their host had free then. A
    pipeline may be alone with a later program: what that one adds is counted in torch's store,
    together with what the host's other ranks have added so far.
    """

    def __init__(self) -> None:
        self._host = socket.gethostname()
        self._free: int | None = None  # before the first program; None: it has not come
        self._planned = 0  # by this rank, for the program that takes the most
        self._of_host = 0  # by all its ranks, for the first program
        self._added = 0  # since then, if there is no store, which counts that of all ranks
        self._store: dist.Store | None = None

    def check(self, row: tuple[Action, ...], costs: Costs) -> str:
        """Return a sentence about what this rank's ``row`` takes; "" if that is no more than what
        earlier ones take. Collective over the world the first time.

        Raises:
            ShortOfHostMemory: a host has less; raised on every rank the first time, later on those
                ranks that have added too much.
        """
        planned = planned_bytes(row, costs)
        if self._free is None:
            return self._begin(planned)
        if planned is None or planned <= self._planned:
            return ""
        return self._add(planned)

    @property
    def planned(self) -> int:
        """The bytes that are counted for this rank."""
        return self._planned

    def give_back_to(self, planned: int) -> None:
        """Count ``planned`` bytes for this rank again: a program that takes more will not run."""
        if planned != self._planned:
            self._count(planned - self._planned)
            self._planned = planned

    def _begin(self, planned: int | None) -> str:
        """Compare the plans of all ranks with what their hosts have."""
        own = _Report(self._host, planned or 0, available_bytes(), uuid.uuid4().hex)
        reports = gather_from_all(own)
        of_hosts: dict[str, list[_Report]] = defaultdict(list)
        for report in reports:
            of_hosts[report.host].append(report)
        for host, ranks in of_hosts.items():
            _refuse_more(host, len(ranks), _planned(ranks), _free(ranks))
        here = of_hosts[self._host]
        self._free, self._planned, self._of_host = _free(here), own.planned, _planned(here)
        if (store := store_of_all()) is not None:
            self._store = dist.PrefixStore(f"megatron_ext/host memory/{reports[0].run}", store)
        if planned is None:
            return (
                "offload: host memory is not known before the first step, as the costs have no "
                "bytes"
            )
        host = max(of_hosts, key=lambda host: _planned(of_hosts[host]))
        ranks = of_hosts[host]
        most = bytes_text(max(report.planned for report in reports))
        return (
            f"offload: up to {most} of host memory a rank, {bytes_text(_planned(ranks))} on "
            f"{host}, which has {bytes_text(_free(ranks))} available"
        )

    def _add(self, planned: int) -> str:
        """Count the bytes that a program takes beyond the earlier ones, unless it is refused."""
        assert self._free is not None
        more = planned - self._planned
        try:
            _refuse_more(self._host, None, self._of_host + self._count(more), self._free)
        except ShortOfHostMemory:
            self._count(-more)
            raise
        self._planned = planned
        return (
            f"offload: {bytes_text(planned)} of host memory on this rank for a program with more "
            f"to offload"
        )

    def _count(self, more: int) -> int:
        """Return the bytes that this host's ranks have added since the first program, ``more``
        of this rank among them."""
        if self._store is None:
            self._added += more
            return self._added
        with losing_the_store(f"{self._host} was to count its host memory"):
            return self._store.add(self._host, more)


@dataclass(frozen=True)
class _Report:
    """Message of a rank about its host. ``run`` is a key that no other training has."""

    host: str
    planned: int
    available: int
    run: str


def _planned(ranks: Sequence[_Report]) -> int:
    return sum(report.planned for report in ranks)


def _free(ranks: Sequence[_Report]) -> int:
    return min(report.available for report in ranks)


def _refuse_more(host: str, ranks: int | None, planned: int, free: int) -> None:
    """Raise ShortOfHostMemory if ``planned`` bytes are more than ``host`` had ``free``."""
    if planned > free:
        who = "its ranks" if ranks is None else f"{ranks} ranks"
        raise ShortOfHostMemory(short_of_memory(f"{host}: {who} need {bytes_text(planned)}", free))


def short_of_memory(who_needs: str, available: int) -> str:
    """The text of an error; ``who_needs`` is its beginning, up to the amount."""
    return (
        f"{who_needs} of host memory for offloaded activations, but only "
        f"{bytes_text(available)} are available: offload less (--pipeline-activation-offload "
        f"half, or fit with a --pipeline-memory-limit), recompute some modules, or give the job "
        f"more memory"
    )
