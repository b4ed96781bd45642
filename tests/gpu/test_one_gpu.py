"""Several ranks on one GPU, where NCCL cannot go: what the executor computes there, and holds.

    pytest -rP tests/gpu/test_one_gpu.py    # by itself: ranks are forked, and CUDA wants that the
                                            # process they come from has not used it

The CPU's cases run everywhere and show that the test itself works; those on a GPU have not been run
yet. They count all that the allocator has given at any moment of a step, also within a pass.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_ext.schedule.build import build_program
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.memory import in_bytes, memory_curve
from megatron_ext.schedule.registry import choose
from megatron_ext.schedule.schedule import P2P, Problem, is_compute
from megatron_ext.schedule.verify import Program
from tests.gpu.one_gpu import Seen, on_rank
from tests.pipeline.storages import messages_on_their_way
from tests.ranks import run_ranks, values

# Shapes between stages: on a GPU large enough that the allocator's rounding does not count.
SHAPES = {"cpu": (32, 16), "cuda": (2048, 512)}
TOLERANCE = 0.1  # a layer's own tensors, for a moment

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
]
CASES = [
    *(("cpu", spec, ranks) for spec, ranks in (("zb-h1", 2), ("zb-v", 3))),
    *(
        pytest.param("cuda", spec, ranks, marks=ON_GPU)
        for spec, ranks in (("zb-h1", 2), ("zb-h1", 4), ("zb-v", 3), ("gis", 2), ("v-half", 4))
    ),
]


@pytest.mark.parametrize("p2p", P2P)
@pytest.mark.parametrize(("device", "spec", "ranks"), CASES)
def test_gradients_are_stocks_and_the_peak_is_the_simulators(
    device: str, spec: str, ranks: int, p2p: P2P
) -> None:
    choice = choose(spec)
    placement = choice.place(ranks)
    problem = Problem(placement, 2 * ranks, uniform(placement, 10, 12, 8, 1), p2p=p2p)
    program = build_program(choice, problem)
    run = partial(on_rank, program=program, device=torch.device(device), shape=SHAPES[device])
    seen: list[Seen] = values(run_ranks(ranks, run, timeout=120))
    assert all(one.gradients_are_stocks for one in seen)
    expected = expected_peaks(program, seen, 4 * SHAPES[device][0] * SHAPES[device][1])
    for rank, (one, peak) in enumerate(zip(seen, expected, strict=True)):
        print(f"{spec}, {ranks} ranks, {p2p}, {device}, rank {rank}: {one.peak} of {peak:.0f}")
    assert [one.peak for one in seen] == pytest.approx(expected, rel=TOLERANCE)


def expected_peaks(program: Program, seen: list[Seen], boundary: int) -> list[float]:
    """The simulator's, by what a stage holds of one microbatch, and what is on its way then."""
    held = {number: figures for one in seen for number, figures in one.held.items()}
    per_stage = [held[number] for number in range(program.schedule.placement.stages)]
    costs = replace(
        program.problem.costs,
        held_bytes={
            Held.ACTIVATION: tuple(float(activation) for activation, _ in per_stage),
            Held.WEIGHT_INPUTS: tuple(float(inputs) for _, inputs in per_stage),
        },
    )
    peaks = []
    for row in program.schedule.rows:
        moving = messages_on_their_way(row, program.schedule.placement)
        at_passes = [n for action, n in zip(row, moving, strict=True) if is_compute(action)]
        curve = memory_curve(row, in_bytes(costs))
        peaks.append(max(a + boundary * n for a, n in zip(curve, at_passes, strict=True)))
    return peaks
