"""Activations that leave for the host, on one GPU: results, the allocator's peak, the copies.

    pytest -rP tests/gpu/test_offload.py    # by itself, as test_one_gpu.py

The CPU's cases run everywhere and show that the test itself works; those on a GPU have not been run
yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_ext.runtime import offload
from megatron_ext.runtime.host_copies import CudaCopies
from megatron_ext.schedule.action import parse
from megatron_ext.schedule.build import build_program
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.registry import choose
from megatron_ext.schedule.schedule import Offload, Problem
from tests.gpu.small_stages import SHAPES, TOLERANCE, Seen, expected_peaks, on_rank
from tests.gpu.test_one_gpu import ON_GPU
from tests.ranks import run_ranks, values

CASES = [
    *(("cpu", spec, ranks) for spec, ranks in (("gis", 2), ("zb-v", 3))),
    *(
        pytest.param("cuda", spec, ranks, marks=ON_GPU)
        for spec, ranks in (("1f1b", 4), ("gis", 2), ("gis-h", 4), ("zb-v", 3), ("v-half", 4))
    ),
]
OUT, BACK = parse("0OFFLOAD_F0"), parse("0RELOAD_F0")


@pytest.mark.parametrize(("device", "spec", "ranks"), CASES)
def test_gradients_are_stocks_and_the_peak_falls(
    device: str, spec: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        monkeypatch.setattr(offload, "SMALL", 0)
    choice = choose(spec)
    placement = choice.place(ranks)
    copies = [3 / placement.chunks] * placement.stages
    costs = uniform(placement, 10, 12, 8, 1).with_host(copies, copies)
    problem = Problem(placement, 4 * ranks, costs)
    peaks = []
    for way in (Offload.NONE, Offload.FULL):
        program = build_program(choice, replace(problem, offload=way))
        run = partial(on_rank, program=program, device=torch.device(device), shape=SHAPES[device])
        seen: list[Seen] = values(run_ranks(ranks, run))
        assert all(one.gradients_are_stocks for one in seen)
        assert any(one.left for one in seen) == (way is Offload.FULL)
        expected = expected_peaks(program, seen, 4 * SHAPES[device][0] * SHAPES[device][1])
        peaks.append([one.peak for one in seen])
        print(f"{spec}, {ranks} ranks, {device}, offload {way}: {peaks[-1]} of {expected}")
        # The samples of the first stage stay: nothing saves them, but they have gradients here.
        assert peaks[-1] == pytest.approx(expected, abs=TOLERANCE * max(peaks[0]))
    without, with_offload = peaks
    assert max(with_offload) < 0.9 * max(without)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
class TestCopies:
    """In a process of its own, as CUDA must not be used before ranks are forked."""

    def test_they_are_quick_and_run_beside_passes(self) -> None:
        ((to_host, from_host, both, with_compute, compute),) = values(run_ranks(1, measure))
        print(f"to the host {to_host:.1f} GB/s, from it {from_host:.1f}, both at once {both:.1f}")
        print(f"compute {compute:.3f} s, with copies beside it {with_compute:.3f} s")
        assert min(to_host, from_host) > 5
        assert both > 1.2 * min(to_host, from_host)
        assert with_compute < 1.25 * compute


def measure(rank: int) -> tuple[float, float, float, float, float]:
    """GB/s out, back and both at once; seconds of compute with copies beside it, and alone."""
    device = torch.device("cuda")
    copies = CudaCopies(device)
    size = 2**30
    hosts = [copies.host_buffer(size) for _ in range(2)]
    assert all(host.is_pinned() and host.numel() == size for host in hosts)
    own = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]

    def out() -> None:
        copies.start(OUT, [(hosts[0], own[0])], None).wait()

    def back() -> None:
        copies.start(BACK, [(own[1], hosts[1])], None).wait()

    def at_once() -> None:
        started = [
            copies.start(OUT, [(hosts[0], own[0])], None),
            copies.start(BACK, [(own[1], hosts[1])], None),
        ]
        for transfer in started:
            transfer.wait()

    matrix = torch.randn(4096, 4096, device=device)

    def compute() -> Tensor:
        result = matrix
        for _ in range(100):
            result = result @ matrix
        return result

    def compute_beside_copies() -> None:
        transfer = copies.start(OUT, [(hosts[0], own[0])], None)
        compute()
        transfer.wait()

    for warm in (out, back, compute):
        seconds(warm)
    to_host, from_host = (size / seconds(run) / 1e9 for run in (out, back))
    both = 2 * size / seconds(at_once) / 1e9
    return to_host, from_host, both, seconds(compute_beside_copies), seconds(compute)


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin
