"""Tests that the messages of a replayed rank move at the times of the composed step.

The kernel that occupies thread blocks has not run on a GPU. The tests show the arguments of its
launch, and that CUDA's assembler accepts it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.rehearsal import cuda_driver, holding_kernel, message_times
from megatron_ext.rehearsal.message_times import MessageTimes
from megatron_ext.rehearsal.request import ReplayRequest

TIMES = {"SEND_F 0>1": (0.25, 0.5), "SEND_B 1>0": (0.75,)}


class Clock:
    """Clock of a device that records its calls."""

    def __init__(self) -> None:
        self.begun = 0
        self.works: list[tuple[str, float, int]] = []

    def begin(self) -> None:
        self.begun += 1

    def work(self, name: str, moved: float, blocks: int) -> Any:
        self.works.append((name, moved, blocks))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(message_times, "_DeviceClock", lambda: made)
    return made


def test_each_message_has_its_own_time_in_timed_steps_alone(clock: Clock) -> None:
    times = MessageTimes(ReplayRequest(TIMES, ctas=32), is_on_gpu=True)
    for is_timed in (False, True, True):
        times.begin_step(is_timed=is_timed)
        times.begin_time()
        for name in ("SEND_F 0>1", "SEND_B 1>0", "SEND_F 0>1"):
            times.post([name])
    assert clock.begun == 3
    moved = [at for _, at, _ in clock.works]
    assert moved == [0, 0, 0, 0.25, 0.75, 0.5, 0.25, 0.75, 0.5]


def test_a_batch_has_moved_with_its_last_message(clock: Clock) -> None:
    times = MessageTimes(ReplayRequest(TIMES), is_on_gpu=True)
    times.begin_step(is_timed=True)
    times.post(["SEND_F 0>1", "SEND_B 1>0"])
    times.post(["SEND_F 0>1"])
    assert [at for _, at, _ in clock.works] == [0.75, 0.5]


@pytest.mark.parametrize(
    ("ctas", "max_ctas", "blocks"), [(32, None, 32), (32, 4, 4), (2, 4, 2), (32, 3, 4)]
)
def test_a_message_holds_the_blocks_of_its_communicator(
    clock: Clock, ctas: int, max_ctas: int | None, blocks: int
) -> None:
    """A message occupies as many blocks as its communicator has CTAs. NCCL rounds a limit up to a
    power of two, and takes no more CTAs than its links need."""
    for has_blocks in (True, False):
        times = MessageTimes(ReplayRequest(TIMES, ctas, has_blocks), is_on_gpu=True)
        times.begin_step(is_timed=True)
        times.post(["SEND_B 1>0"], max_ctas)
    assert [of for _, _, of in clock.works] == [blocks, 0]


def test_a_message_that_the_composed_step_has_not_is_an_error() -> None:
    times = MessageTimes(ReplayRequest(TIMES))
    times.begin_step(is_timed=True)
    times.post(["SEND_B 1>0"])
    with pytest.raises(ValueError, match="SEND_B 1>0: a replayed rank has posted message 2"):
        times.post(["SEND_B 1>0"])


def test_the_time_begins_at_the_first_pass_or_message(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 100.0, list[float]()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "sleep", slept.append)
    times = MessageTimes(ReplayRequest(TIMES))
    times.begin_step(is_timed=True)
    now = 200.0
    times.begin_time()
    now = 200.125
    times.begin_time()  # the step's second pass does not change its begin
    times.post(["SEND_F 0>1"]).wait()
    now = 300.0
    times.post(["SEND_F 0>1"]).wait()
    assert slept == [0.125, 0.0]


class Stream:
    cuda_stream = 0x77


def test_the_kernel_is_started_with_blocks_and_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def launch(function: str, kernel: Any, *given: Any) -> None:
        *shape, _, stream, arguments, _ = given
        number = 1 if kernel == "begin_time" else 2
        pointers = (
            ctypes.cast(arguments[n], ctypes.POINTER(ctypes.c_uint64)) for n in range(number)
        )
        values = [pointer.contents.value for pointer in pointers]
        launches.append((function, kernel, [n.value for n in shape], stream.value, values))

    monkeypatch.setattr(cuda_driver, "driver_call", launch)
    names = ("begin_time", "hold_multiprocessors", "hold_none")
    monkeypatch.setattr(holding_kernel, "holding_kernel", lambda: {name: name for name in names})
    began = torch.zeros(2, dtype=torch.int64)
    holding_kernel.begin_time(Stream(), began)  # type: ignore[arg-type]
    holding_kernel.hold(Stream(), began, 0.0125, 4)  # type: ignore[arg-type]
    holding_kernel.hold(Stream(), began, 0.0125, 0)  # type: ignore[arg-type]
    at = began.data_ptr()
    call = "cuLaunchKernel"
    assert launches == [
        (call, "begin_time", [1, 1, 1, 1, 1, 1], 0x77, [at]),
        (call, "hold_multiprocessors", [4, 1, 1, 640, 1, 1], 0x77, [at, 12_500_000]),
        (call, "hold_none", [1, 1, 1, 32, 1, 1], 0x77, [at, 12_500_000]),
    ]


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas to assemble the kernel")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_a_block_owns_its_multiprocessor_or_leaves_it(architecture: str, tmp_path: Path) -> None:
    """A block takes nearly all of the 65,536 registers of a multiprocessor, so no other block fits
    next to it. The kernel for a message that occupies no blocks has a single warp, which takes less
    than a hundredth of the registers."""
    (tmp_path / "hold.ptx").write_text(holding_kernel.kernels())
    ended = subprocess.run(
        ["ptxas", "-v", f"-arch={architecture}", "hold.ptx", "-o", "hold.cubin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    parts = ended.stderr.split("Compiling entry function '")[1:]
    used = {part.split("'")[0]: int(part.split("Used ")[1].split()[0]) for part in parts}
    owns = used["hold_multiprocessors"]
    assert 0.9 * 65_536 < holding_kernel.THREADS * (owns + -owns % 8) <= 65_536
    assert 32 * used["hold_none"] < 655
    assert "begin_time" in used
