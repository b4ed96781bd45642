"""Tests that one rank searches for a schedule on behalf of all, and that waiting ranks end when it
fails or dies.

Each rank used to search by itself: a node did eight times the work, and a search took longer.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_ext.adapter.programs import Programs, StepKey
from megatron_ext.compile.program.verify import InvalidSchedule
from megatron_ext.config import PipelineConfig
from megatron_ext.launch.planner import chosen_plan, launch_choice
from megatron_ext.launch.script import Chosen
from megatron_ext.runtime.host.host_memory import HostMemory
from megatron_ext.runtime.store import leader as waiting
from megatron_ext.runtime.store.agreement import Fact, agree
from megatron_ext.runtime.store.leader import run_on_leader
from megatron_ext.runtime.world import store_of_all
from tests.helpers.ranks import (
    RankResult,
    agent_store,
    run_ranks,
    running_ranks,
    torchrun_environment,
    values,
)

pytestmark = pytest.mark.real_time

RANKS = 3
HERE = "at work"


def asked(work: Callable[[], Any], late: int | None = None) -> Callable[[int], tuple[Any, int]]:
    """Return a function for each rank that requests ``work`` twice, and returns the result and the
    number of times the rank did the work. Rank ``late`` starts after the others."""

    def on_rank(rank: int) -> tuple[Any, int]:
        store = store_of_all()
        assert store is not None
        if rank == late:
            time.sleep(1.0)
        worked: list[None] = []

        def counted() -> Any:
            worked.append(None)
            return work()

        apart = dist.PrefixStore("a search", store)
        for _ in range(2):  # a rank may request the same work again
            result = run_on_leader(apart, rank, "the search", counted)
        return result, len(worked)

    return on_rank


def take_long() -> str:
    time.sleep(0.3)
    return "rows" * 100_000


def run_out_of_memory() -> None:
    raise MemoryError("no more")


def refuse() -> None:
    raise InvalidSchedule("does not fit")


def work_for_ever() -> None:
    sys.stderr.write(f"{HERE}\n")  # the stream writes a line at its newline
    time.sleep(600)


def test_one_rank_works_for_all() -> None:
    results = values(run_ranks(RANKS, asked(take_long)))
    assert [result for result, _ in results] == ["rows" * 100_000] * RANKS
    assert [worked for _, worked in results] == [1, 0, 0]


def test_who_comes_first_does_not_wait_for_ever_for_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that requests work does the work itself if rank 0 does not come soon. Rank 0 may be in
    a pipeline whose step has no such work."""
    monkeypatch.setattr(waiting, "AHEAD_SECONDS", 0.1)
    results = values(run_ranks(2, asked(take_long, late=0)))
    assert [worked for _, worked in results] == [0, 1]


def errors(results: list[RankResult]) -> list[str]:
    return [result.error.strip().splitlines()[-1] for result in results]


def test_a_refusal_is_every_ranks() -> None:
    refusal = "megatron_ext.compile.program.verify.InvalidSchedule: does not fit"
    assert errors(run_ranks(2, asked(refuse))) == [refusal] * 2


def test_no_memory_on_the_rank_that_works_ends_all() -> None:
    own, others = errors(run_ranks(2, asked(run_out_of_memory)))
    assert own == "MemoryError: no more"
    assert others.startswith("RuntimeError: the search failed on global rank 0 on ")
    assert others.endswith(", for all ranks: MemoryError: no more")


def test_who_is_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for a working rank end soon after that one is killed, for example by the
    kernel for its memory. The store still answers, in torchrun's agent or in another rank."""
    monkeypatch.setattr(waiting, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "SILENT_SECONDS", 1.0)
    with running_ranks(2, asked(work_for_ever)) as running:
        running.wait_until_it_says(0, HERE)
        time.sleep(1.5)  # the rank works for longer than a rank may be silent
        running.send_signal(0, signal.SIGKILL)
        killed, other = running.wait()
    assert killed.exit_code == -signal.SIGKILL and killed.seconds < other.seconds
    (error,) = errors([other])
    assert "RuntimeError: global rank 0 on " in error and "no progress for 1 s" in error


class Watched:
    """Store that calls ``before`` with a method's name before each call of that method."""

    def __init__(self, store: dist.Store, before: Callable[[str], object]) -> None:
        self._store = store
        self._before = before

    def __getattr__(self, name: str) -> Any:
        self._before(name)
        return getattr(self._store, name)


def test_who_is_killed_with_the_store_is_not_waited_for() -> None:
    """Ranks that wait for a working rank end if that rank is killed together with the store.
    Without torchrun the store is in the process of global rank 0."""

    def on_rank(rank: int, port: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        sys.stderr.write(f"port {store.port}\n")
        watched: Any = Watched(store, lambda name: sys.stderr.write(f"calls {name}\n"))
        run_on_leader(watched if rank else store, rank, "the search", work_for_ever)

    with running_ranks(1, lambda rank: on_rank(0, 0), connect=False) as first:
        first.wait_until_it_says(0, HERE)
        port = int(first.stderr(0).split()[1])
        with running_ranks(1, lambda rank: on_rank(1, port), connect=False) as second:
            # The second rank waits, and knows which rank works.
            second.wait_until_it_says(0, "calls add")
            first.send_signal(0, signal.SIGKILL)
            (error,) = errors(second.wait())
    assert error.startswith("RuntimeError: torch's key-value store is gone, and global rank 0 on ")


@pytest.mark.parametrize(
    ("call", "rank", "words"),
    [
        ("check", 1, "global rank 1 on .* requested the search"),
        ("compare_set", 1, "global rank 1 on .* requested the search"),
        ("get", 1, "global rank 1 on .* requested the search"),
        ("set", 0, "global rank 0 on .* was to tell the result of the search"),
    ],
)
def test_a_store_that_is_lost_is_called_so_whenever_it_goes(
    call: str, rank: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank reports a lost store as such, at whichever call of the store it notices. If the store
    ended at another moment, the waiting rank used to end with "Broken pipe"."""

    def lose(name: str) -> None:
        if name == call:
            raise dist.DistNetworkError("Broken pipe")

    monkeypatch.setattr(waiting, "AHEAD_SECONDS", 0.1)  # a short wait for a rank 0 that never comes
    store = dist.HashStore()
    if call == "get":
        assert run_on_leader(store, 0, "the search", take_long)
    lost: Any = Watched(store, lose)
    with pytest.raises(RuntimeError, match=f"torch's key-value store is gone, and {words}"):
        run_on_leader(lost, rank, "the search", take_long)


def telling_settings(store: Any) -> None:
    agree(store, 0, 1, {"torch": Fact("2.9")}, timedelta(seconds=2))


def counting_host_memory(store: Any) -> None:
    memory = HostMemory()
    memory._store = store
    memory._count(1)


def comparing_programs(store: Any) -> None:
    programs = Programs(PipelineConfig(schedule="zb-h1"), lambda *_: {})
    programs._has_compared = True  # programs have been compared with all ranks before
    pipeline: Any = None
    programs._compare("0123", StepKey("zb-h1", (1, 8), 4, False, 0, False), pipeline)


@pytest.mark.parametrize(
    ("use", "call", "words"),
    [
        (telling_settings, "add", "the ranks were telling one another their settings"),
        (telling_settings, "set", "the ranks were telling one another their settings"),
        (telling_settings, "get", "the ranks were telling one another their settings"),
        (counting_host_memory, "add", ".* was to count its host memory"),
        (comparing_programs, "compare_set", "global rank 1 was to compare its program"),
    ],
)
def test_a_store_that_is_lost_at_other_work_is_called_lost(
    use: Callable[[Any], None], call: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def lose(name: str) -> None:
        called.append(name)
        if name == call:
            raise dist.DistNetworkError("Broken pipe")

    lost: Any = Watched(dist.HashStore(), lose)
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: lost)
    with pytest.raises(RuntimeError, match=f"torch's key-value store is gone, and {words}"):
        use(lost)
    assert called[-1] == call


def test_one_rank_chooses_the_plan_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank chooses the plan for all ranks before there are process groups. It passes the plan
    on through the store of torchrun's agent."""
    chosen: list[str] = []

    def choose_for(argv: list[str], config: PipelineConfig, world_size: int) -> Chosen:
        chosen.append("here")
        return Chosen(tuple(argv), "why")

    def on_rank(rank: int, port: int) -> tuple[Any, int]:
        os.environ |= torchrun_environment(rank, 2, port)
        made = chosen_plan.choose_plan(["--a"], PipelineConfig(schedule="plan"), 2)
        return made, len(chosen)

    monkeypatch.setattr(launch_choice, "choose_for", choose_for)
    with agent_store() as port:
        results = values(run_ranks(2, lambda rank: on_rank(rank, port), connect=False))
    assert results == [(Chosen(("--a",), "why"), 1), (Chosen(("--a",), "why"), 0)]
