"""Random programs one after another on the same ranks, without a hang and without a leak.

In each iteration all ranks draw the same family, number of microbatches and costs, and build, prove
and run the program for themselves, over channels that serve all families. The gradients must be
those of one process, to the last bit, and nothing may be left: no message, no activation, no weight
gradient. After the first fifth of the iterations no rank may grow.
"""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.graph import Channel, channels
from megatron_ext.compile.program.verify import InvalidSchedule, Program
from megatron_ext.compile.registry import choose, entries
from megatron_ext.runtime.executor import execute
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.transport import Boundary, Transport
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from tests.helpers.combinations import IS_NIGHT
from tests.helpers.ranks import run_ranks, values
from tests.helpers.stages import CPU, WIDTH, LinearStage, add_gradients, world

RANKS = 4
ITERATIONS = 200 if IS_NIGHT else 25
MICROBATCHES = 12
GROWTH = 2**20 * (2 if IS_NIGHT else 1)  # bytes that a rank may grow by
SEARCHES = [name for name, entry in entries().items() if entry.traits.searches]


def test_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in SEARCHES:  # long ones, which the ranks then find in their cache
        searched(name)
    first, *others = values(run_ranks(RANKS, soak))
    drawn, _ = first
    assert len(drawn) == ITERATIONS and len(set(drawn)) > 15
    assert all(names == drawn for names, _ in others)
    assert max(growth for _, growth in [first, *others]) <= GROWTH


def soak(rank: int) -> tuple[list[str], int]:
    """Run all iterations of a rank; their programs, and the bytes by which the rank has grown."""
    ways = Channels(world(), all_channels(), CPU)
    recorder, rng = Recorder(rank), random.Random(1)
    drawn, sizes = [], []
    for _ in range(ITERATIONS):
        name, program = draw(rng)
        run(program, ways, recorder)
        drawn.append(name)
        sizes.append(resident())
    return drawn, sizes[-1] - sizes[len(sizes) // 5]


def draw(rng: random.Random) -> tuple[str, Program]:
    """A random program, the same on every rank, and its description."""
    while True:
        name = rng.choice(list(entries()))
        microbatches = rng.randint(1, MICROBATCHES)
        f, i, w = (rng.uniform(1, 20) for _ in range(3))
        comm = rng.choice([0.0, rng.uniform(0, 5)])
        try:
            if name in SEARCHES:
                return f"{name}, searched", searched(name)
            return f"{name}, m={microbatches}", build(name, microbatches, f, i, w, comm)
        except InvalidSchedule:
            continue  # a size that the family refuses


def searched(name: str) -> Program:
    return build(name, 2, 10.0, 12.0, 8.0, 1.0)


def build(name: str, microbatches: int, f: float, i: float, w: float, comm: float) -> Program:
    resolved = choose(name)
    placement = resolved.place(RANKS)
    costs = uniform(placement, f, i, w, comm)
    return build_program(resolved, Problem(placement, microbatches, costs))


def all_channels() -> set[Channel]:
    """The channels of all families together. Each has messages to every neighbour that it has."""
    union: set[Channel] = set()
    for name in entries():
        if name not in SEARCHES:  # placed as others are
            union |= set(channels(build(name, RANKS, 1, 1, 1, 0).schedule))
    return union


def run(program: Program, ways: Channels, recorder: Recorder) -> None:
    """One step of ``program``, and what must hold after it."""
    placement = program.schedule.placement
    stages = {
        number: LinearStage(number, placement.stages) for number in placement.stages_of[ways.rank]
    }
    transport = Transport(ways, Boundary((3, WIDTH), torch.float32), placement, recorder)
    execute(program, stages, transport, recorder)
    assert transport.is_empty(), "messages are left over"
    assert not len(queue), "weight gradients are left over"
    queue.clear()  # the step is over: it need not know these weights any more
    assert recorder.position is None
    reference = [LinearStage(number, placement.stages) for number in range(placement.stages)]
    add_gradients(reference, program)
    for number, stage in stages.items():
        assert stage.is_empty(), f"activations of stage {number} are left over"
        for gradient, alone in zip(stage.gradients, reference[number].gradients, strict=True):
            assert torch.equal(gradient, alone), f"gradients of stage {number}"


def resident() -> int:
    """The bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
