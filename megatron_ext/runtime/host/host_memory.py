"""Free memory of a host, and the part of it that offload takes.

A job that offloads more than a host has free would fail minutes after its start. So the ranks of a
host add up what their programs will copy there, compare the sum with the free memory of the machine
and its control groups, and refuse to train before the first step.
"""

from __future__ import annotations

import math
import socket
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_ext.base.words import bytes_text
from megatron_ext.compile.program.memory import in_bytes, most_on_host
from megatron_ext.runtime.store.lost_store import losing_the_store
from megatron_ext.runtime.world import gather_from_all, store_of_all
from megatron_ext.schedule.action import Action, token_share
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import Held

# Factor on estimated sizes of host buffers, since estimates ignore small tensors such as indices
# and statistics of norms. If a buffer were a little too small, all copies of the first step would
# go to pages that are not pinned.
_ALLOWANCE = 17 / 16


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that a process can still allocate on this machine.

    They are the smallest of the machine's free memory and what its control groups (version 2)
    allow. ``root`` is the root of the file system.
    """
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
    """Return the bytes that a control group's limit leaves, as a list; empty if there is no limit.

    Cached files count as free.
    """
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return []
    return [] if limit == "max" else [int(limit) - used + int(stat.get("inactive_file", 0))]


def buffer_sizes(row: tuple[Action, ...], costs: Costs) -> dict[tuple[int, Held], int]:
    """Return the bytes of each host buffer for offload on a rank, by stage and kind of memory.

    Empty if ``costs`` have no bytes.
    """
    if costs.held_bytes is None:
        return {}
    amount, tokens = in_bytes(costs), max(token_share(action.microbatch) for action in row)
    return {
        (stage, held): math.ceil(amount(held, stage) * tokens * _ALLOWANCE)
        for stage, held in most_on_host(row)
    }


def planned_bytes(row: tuple[Action, ...], costs: Costs) -> int | None:
    """Return the bytes of all host buffers for offload on a rank.

    Return None if ``costs`` have no bytes.
    """
    if costs.held_bytes is None:
        return None
    sizes = buffer_sizes(row, costs)
    return sum(count * sizes[key] for key, count in most_on_host(row).items())


class ShortOfHostMemory(ValueError):
    """Error: the ranks of a host plan to offload more memory than the host has free."""


class HostMemory:
    """Account of the host memory that the ranks of this host plan to use for offloaded activations.

    For the first program all ranks gather their plans and their hosts' free memory. Later programs
    may be built by one pipeline alone: what such a program needs in addition is counted in torch's
    store, for all ranks of the host.
    """

    def __init__(self) -> None:
        self._host = socket.gethostname()
        # Free bytes of the host before the first program was planned; None until then.
        self._free: int | None = None
        self._planned = 0  # bytes that this rank plans to hold under its largest program
        self._of_host = 0  # bytes that all ranks of the host plan to hold under the first program
        # Bytes that this rank has planned in addition since the first program; used if no store
        # sums the bytes of all ranks.
        self._added = 0
        self._store: dist.Store | None = None

    def check(self, row: tuple[Action, ...], costs: Costs) -> str:
        """Check that the host has enough memory for the offloads in a rank's ``row``.

        Returns a sentence about the memory, or "" if earlier programs take as much. Collective over
        the world the first time.

        Raises:
            ShortOfHostMemory: a host has less memory. The first time every rank raises it, later
                only the ranks that have planned too much.
        """
        planned = planned_bytes(row, costs)
        if self._free is None:
            return self._begin(planned)
        if planned is None or planned <= self._planned:
            return ""
        return self._add(planned)

    @property
    def planned(self) -> int:
        """Bytes of host memory that this rank plans to use for offload."""
        return self._planned

    def give_back_to(self, planned: int) -> None:
        """Reduce the host memory counted for this rank to ``planned`` bytes.

        Called if a program that takes more will not run.
        """
        if planned != self._planned:
            self._count(planned - self._planned)
            self._planned = planned

    def _begin(self, planned: int | None) -> str:
        """Compare the planned host memory of all ranks with the free memory of their hosts.

        A rank that runs alone in a rehearsal counts once, though it stands for all ranks.
        """
        this_report = _Report(self._host, planned or 0, available_bytes(), uuid.uuid4().hex)
        reports = list({report.run: report for report in gather_from_all(this_report)}.values())
        of_hosts: dict[str, list[_Report]] = defaultdict(list)
        for report in reports:
            of_hosts[report.host].append(report)
        for host, ranks in of_hosts.items():
            _refuse_more(host, len(ranks), _planned(ranks), _free(ranks))
        here = of_hosts[self._host]
        self._free, self._planned, self._of_host = _free(here), this_report.planned, _planned(here)
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
        """Count the host bytes that a program takes beyond the earlier ones.

        Raises ShortOfHostMemory if the host has fewer.
        """
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
        """Add ``more`` bytes to this rank's host memory, and return the sum of this host's ranks.

        The sum is of bytes added since the first program.
        """
        if self._store is None:
            self._added += more
            return self._added
        with losing_the_store(f"{self._host} was to count its host memory"):
            return self._store.add(self._host, more)


@dataclass(frozen=True)
class _Report:
    """Report of a rank about the memory that it plans to use on its host, and the free memory.

    ``run`` is a key that no other training has.
    """

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
    """Return the text of an error about too little host memory.

    ``who_needs`` is its beginning: who needs memory, and how much.
    """
    return (
        f"{who_needs} of host memory for offloaded activations, but only "
        f"{bytes_text(available)} are available"
    )
