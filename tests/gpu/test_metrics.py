"""Tests of the metrics of steps that a device still runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import choose
from megatron_ext.observe.metrics import RankSums
from megatron_ext.runtime.held_bytes import reserved_beyond_allocated
from megatron_ext.runtime.measure.exchange import AsyncAllGather
from megatron_ext.runtime.measure.step_sums import StepSums
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
]

CYCLES = 200_000_000  # clock cycles of a pass: about a tenth of a second


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    dist.all_reduce(torch.ones(1, device="cuda"))  # the first collective creates the communicator
    yield dist.group.WORLD
    torch.cuda.set_sync_debug_mode("default")
    dist.destroy_process_group()


def test_nothing_is_synchronised(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics never synchronise the host with the device. A step is read when the device has ended
    it, and numbers are exchanged while the device runs the next step."""
    torch.cuda._sleep(1000)  # the first call of _sleep loads its kernel
    stream = torch.cuda.Stream()
    AsyncAllGather(group, [0.0] * 5, stream).wait()  # the first gather allocates the pinned memory
    resolved = choose("1f1b")
    placement = resolved.place(1)
    program = build_program(resolved, Problem(placement, 2, uniform(placement, 1, 1, 1)))
    recorder, steps = Recorder(0), StepSums(torch.device("cuda"))

    def step() -> None:
        steps.begin(recorder)
        for action in program.schedule.compute_rows[0]:
            with recorder.computing(action):
                torch.cuda._sleep(CYCLES // 4)
        recorder.end()
        steps.end(program, 0)

    def refuse(*args: Any) -> None:
        raise AssertionError("the host waits for the device, which a step must not do")

    step()
    torch.cuda.synchronize()
    step()  # the step has four passes, as many as a host may be ahead
    torch.cuda.set_sync_debug_mode("error")
    with monkeypatch.context() as within:
        within.setattr(torch.cuda, "synchronize", refuse)
        within.setattr(torch.cuda.Event, "synchronize", refuse)
        begin = time.perf_counter()
        exchange = AsyncAllGather(group, steps.take().numbers(1), stream)
        steps.begin(recorder)
        seconds = time.perf_counter() - begin
        while not exchange.has_come():
            time.sleep(0.001)
    torch.cuda.set_sync_debug_mode("default")
    (row,) = exchange.rows()
    told = RankSums.of(row)
    assert told.steps == 1, "of the step that the device still runs something was read"
    assert seconds < told.busy / 4, "the host waited"
    assert told.busy == pytest.approx(told.span, rel=0.05)
    assert told.reserved >= told.allocated > 0


def test_memory_that_is_reserved_and_not_allocated_is_reported() -> None:
    """Metrics report the memory that torch's allocator reserves but does not allocate. A tensor
    over 1 MiB gets a segment of at least 20 MiB, of which 3 MiB are allocated here."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = reserved_beyond_allocated(torch.device("cuda"))
    tensor = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
    after = reserved_beyond_allocated(torch.device("cuda"))
    assert before is not None and after is not None
    assert after - before == 20 * 2**20 - tensor.numel()
    assert reserved_beyond_allocated(torch.device("cpu")) is None
