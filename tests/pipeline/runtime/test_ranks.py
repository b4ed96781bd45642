"""Tests of the helper that forks the ranks of tests (`tests.helpers.ranks`).

They concern the process with the stores at which ranks meet, the thread of a rank that polls
sockets, the scheduling of ranks, and the memory of their Python frames.
"""

from __future__ import annotations

import os
import resource
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import ranks
from tests.helpers.ranks import Script, run_ranks, values


def test_it_keeps_no_pipe_of_the_tests_open() -> None:
    """The process with the ranks' stores inherits no pipe of the tests. A `Script` ends when its
    pipe is closed, and would wait for ever if another forked process had a copy of the tests'
    end."""
    script = Script()
    stores = ranks._process_of_stores.__wrapped__()
    try:
        script._connection.close()
        assert script._process.wait(timeout=60) == 0
        stores.send(None)
        port = stores.recv()
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        store.set("key", "value")
        assert store.get("key") == b"value"
    finally:
        script._process.kill()
        stores.close()


def test_all_groups_of_a_rank_share_a_thread() -> None:
    assert values(run_ranks(2, _polling_threads)) == [1, 1]


def _polling_threads(rank: int) -> int:
    for _ in range(3):
        group: Any = dist.new_group([0, 1])
        dist.all_reduce(torch.zeros(1), group=group)
    names = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has batch scheduling")
def test_a_rank_has_batch_scheduling() -> None:
    def policy(rank: int) -> int | None:
        policy = os.sched_getscheduler(0)
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError:
            return None
        return policy

    (policy_of_rank,) = values(run_ranks(1, policy, connect=False))
    if policy_of_rank is None:
        pytest.skip("this system refuses batch scheduling")
    assert policy_of_rank == os.SCHED_BATCH


def test_calls_of_a_rank_map_no_memory() -> None:
    """Calls within a rank map no memory in the steady state. Python stores the frames of calls in
    chunks of memory, and maps or unmaps a chunk each time that calls cross its end. Without the
    remedy in `tests.helpers.ranks` this would happen several times in each recursion of this
    test."""

    def descend(left: int) -> int:
        return left and descend(left - 1)

    def faults(rank: int) -> int:
        descend(500)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(1000):
            descend(500)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert values(run_ranks(1, faults))[0] < 1000
