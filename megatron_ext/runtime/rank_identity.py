"""Process and host of a pipeline rank, which every message about a rank ends with.

With several kinds of parallelism many ranks have the same pipeline rank, and a log has lines of all
of them.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Process:
    """Process of a rank in torch's world.

    ``local_rank`` is None if the launcher does not set it; ``host`` is "" if it is not known yet.
    """

    global_rank: int
    host: str
    local_rank: int | None

    def __str__(self) -> str:
        local = "" if self.local_rank is None else f", local rank {self.local_rank}"
        return f"global rank {self.global_rank}{local}{self.host and f' on {self.host}'}"


@dataclass(frozen=True)
class RankIdentity:
    """Identity of a pipeline rank and of its peers, for messages about the rank.

    ``processes`` are those of all pipeline ranks, in order; empty if the ranks have not exchanged
    them.
    """

    rank: int
    processes: tuple[Process, ...] = ()
    iteration: int | None = None

    def note(self, *peers: int) -> str:
        """Return a text in brackets that names this rank, ``peers``, the iteration and the time."""
        facts = [
            f"pipeline rank {rank} is {self.processes[rank]}"
            for rank in dict.fromkeys((self.rank, *peers))
            if self.processes
        ]
        if self.iteration is not None:
            facts.append(f"iteration {self.iteration}")
        facts.append(time.strftime("%Y-%m-%d %H:%M:%S"))
        return f"[{'; '.join(facts)}]"


def first_identity(pipeline: dist.ProcessGroup) -> RankIdentity:
    """Return the `RankIdentity` of this rank before ranks have exchanged their hosts.

    The ranks are those of ``pipeline``.
    """
    others = [Process(rank, "", None) for rank in dist.get_process_group_ranks(pipeline)]
    rank = pipeline.rank()
    return RankIdentity(rank, (*others[:rank], _this_process(), *others[rank + 1 :]))


def rank_identity(pipeline: dist.ProcessGroup) -> RankIdentity:
    """Return the `RankIdentity` of this rank. Collective over ``pipeline``."""
    processes = [_this_process()] * pipeline.size()
    dist.all_gather_object(processes, _this_process(), group=pipeline)
    return RankIdentity(pipeline.rank(), tuple(processes))


def _this_process() -> Process:
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
    return Process(dist.get_rank(), socket.gethostname(), None if local is None else int(local))
