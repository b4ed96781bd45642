"""A step with and without activation offload, and a measurement of its copies without the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.features.offload.runtime import offload
from megatron_ext.runtime.host.copies import copies_on
from megatron_ext.schedule.action import parse_action
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Offload, Problem
from tests.gpu.small_stages import (
    SHAPES,
    Seen,
    boundary_bytes,
    device_of,
    expected_peaks,
    on_rank,
)
from tests.helpers.ranks import run_ranks, values

OUT, BACK = parse_action("0OFFLOAD_F0"), parse_action("0RELOAD_F0")


@dataclass(frozen=True)
class Step:
    """Results of a step; ``peaks`` and ``expected`` are bytes by rank, measured and simulated."""

    seen: list[Seen]
    expected: list[float]

    @property
    def peaks(self) -> list[int]:
        return [rank.peak for rank in self.seen]


def step(spec: str, ranks: int, kind: str, way: Offload) -> Step:
    """Run a step on ``ranks`` forked ranks. On the CPU the smallest tensors are offloaded too."""
    resolved = choose(spec)
    placement = resolved.place(ranks)
    copies = [3 / placement.chunks] * placement.stages
    costs = uniform(placement, 10, 12, 8, 1).with_host(copies, copies)
    program = build_program(
        resolved, Problem(placement, 4 * ranks, costs).with_options(activation_offload=way)
    )
    run = partial(_on_rank, program=program, device=device_of(kind), shape=SHAPES[kind])
    seen: list[Seen] = values(run_ranks(ranks, run))
    return Step(seen, expected_peaks(program, seen, boundary_bytes(kind)))


def _on_rank(rank: int, program: Program, device: torch.device, shape: tuple[int, int]) -> Seen:
    if device.type == "cpu":
        offload.SMALL = 0
    return on_rank(rank, program, device, shape)


@dataclass(frozen=True)
class Copies:
    """Rates of copies in GB/s, to the host, from it, and both at once; seconds of compute with
    copies in parallel, and without."""

    to_host: float
    from_host: float
    both: float
    with_compute: float
    compute: float


def measure_copies(rank: int, kind: str) -> Copies:
    device = device_of(kind)
    copies = copies_on(device)
    size, width = (2**30, 4096) if kind == "cuda" else (2**20, 64)
    hosts = [copies.host_buffer(size) for _ in range(2)]
    assert all(host.numel() == size for host in hosts)
    assert kind == "cpu" or all(host.is_pinned() for host in hosts)
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

    matrix = torch.randn(width, width, device=device)

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
        _seconds(warm)
    to_host, from_host = (size / _seconds(run) / 1e9 for run in (out, back))
    both = 2 * size / _seconds(at_once) / 1e9
    return Copies(to_host, from_host, both, _seconds(compute_beside_copies), _seconds(compute))


def _seconds(run: Callable[[], object]) -> float:
    _synchronize()
    begin = time.perf_counter()
    run()
    _synchronize()
    return time.perf_counter() - begin


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
