"""Tests of values that one rank sends to all others, and of a rank that runs alone.

Under torch's fake backend, a rank other than the first used to wait for the values of rank 0. It
never received their size, took garbage for it, and tried to allocate 94 TB.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.runtime.host import host_memory as host_memory
from megatron_ext.runtime.host.host_memory import HostMemory
from megatron_ext.runtime.world import gather_from_all, is_alone, store_of_all, told_by_rank_0
from tests.helpers.forked import run_forked
from tests.helpers.ranks import run_ranks, values
from tests.unit.runtime.test_host_memory import COSTS, larger


def test_rank_0_works_for_all_and_its_error_is_everybodys() -> None:
    def run(rank: int) -> tuple[bool, int, str]:
        def fail() -> int:
            raise KeyError(f"of rank {rank}")

        told = told_by_rank_0(lambda: rank)
        try:
            told_by_rank_0(fail)
        except KeyError as error:
            return is_alone(), told, str(error)
        return is_alone(), told, ""

    assert values(run_ranks(2, run)) == 2 * [(False, 0, "'of rank 0'")]


def alone(check: Callable[[], None], folder: Path) -> None:
    """Run ``check()`` on rank 1 of 4, which runs alone."""

    def run() -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        check()

    log = folder / "log"
    assert run_forked(run, log) == 0, log.read_text()


def test_a_rank_that_is_alone_works_for_itself(tmp_path: Path) -> None:
    def check() -> None:
        assert is_alone()
        assert store_of_all() is None
        assert told_by_rank_0(lambda: "its own") == "its own"
        assert gather_from_all("its own") == 4 * ["its own"]

    alone(check, tmp_path)


def test_a_rank_that_is_alone_takes_host_memory_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank that runs alone counts only its own host memory. It stands for all ranks of its job,
    but these are not on its host."""

    def check() -> None:
        HostMemory().check(larger(4), COSTS)

    monkeypatch.setattr(host_memory, "available_bytes", lambda: 5 * 2**30)
    alone(check, tmp_path)
