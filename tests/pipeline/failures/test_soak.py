"""Test that runs random programs one after another on the same ranks, without a hang and without a
leak.

In each iteration all ranks draw the same family, number of microbatches and costs, and each builds,
proves and runs the program, over channels that serve all families. Gradients must be those of one
process, to the last bit, and no message, activation or weight gradient may be left. After the first
fifth of the iterations no rank's memory may grow.
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
GROWTH = 2**20 * (2 if IS_NIGHT else 1)  # bytes by which a rank's memory may grow
SEARCHES = [name for name, entry in entries().items() if entry.traits.searches]


def test_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in SEARCHES:  # long searches, whose results the ranks then find in their cache
        searched(name)
    first, *others = values(run_ranks(RANKS, soak))
    drawn, _ = first
    assert len(drawn) == ITERATIONS and len(set(drawn)) > 15
    assert all(names == drawn for names, _ in others)
    assert max(growth for _, growth in [first, *others]) <= GROWTH


def soak(rank: int) -> tuple[list[str], int]:
    """Run all iterations on ``rank``, and return the programs' names and the growth of the rank in
    bytes."""
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
    """Draw a random program, the same on every rank, and return its description and the program."""
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
            continue  # the family refuses this size


def searched(name: str) -> Program:
    return build(name, 2, 10.0, 12.0, 8.0, 1.0)


def build(name: str, microbatches: int, f: float, i: float, w: float, comm: float) -> Program:
    resolved = choose(name)
    placement = resolved.place(RANKS)
    costs = uniform(placement, f, i, w, comm)
    return build_program(resolved, Problem(placement, microbatches, costs))


def all_channels() -> set[Channel]:
    """Return the channels of all families together. A family sends both ways between all of its
    neighbours."""
    union: set[Channel] = set()
    for name in entries():
        if name not in SEARCHES:  # searching families have the placements of the other families
            union |= set(channels(build(name, RANKS, 1, 1, 1, 0).schedule))
    return union


def run(program: Program, ways: Channels, recorder: Recorder) -> None:
    """Run one step of ``program``, and check its gradients and that nothing is left."""
    placement = program.schedule.placement
    stages = {
        number: LinearStage(number, placement.stages) for number in placement.stages_of[ways.rank]
    }
    transport = Transport(ways, Boundary((3, WIDTH), torch.float32), placement, recorder)
    execute(program, stages, transport, recorder)
    assert transport.is_empty(), "messages are left over"
    assert not len(queue), "weight gradients are left over"
    queue.clear()  # forget the weights of this step
    assert recorder.position is None
    reference = [LinearStage(number, placement.stages) for number in range(placement.stages)]
    add_gradients(reference, program)
    for number, stage in stages.items():
        assert stage.is_empty(), f"activations of stage {number} are left over"
        for gradient, alone in zip(stage.gradients, reference[number].gradients, strict=True):
            assert torch.equal(gradient, alone), f"gradients of stage {number}"


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
