"""Measure how far a step is from what was predicted with costs measured in the same run.

    python -m scripts.benchmarks.prediction
    python -m scripts.benchmarks.prediction --schedules zb-v --costs f=60,i=70,w=50 --json

Ranks whose passes sleep (as in `executors`) begin with a schedule made for wrong costs, F,
I and W alike. They measure what their passes cost as `--pipeline-costs profile` does, rebuild
the schedule, and run some more steps, of which the median makespan is compared with the
prediction. Sleeping takes no core, so a pipeline of four runs on two; the time of the host between
passes is in the measured step and not in the prediction.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from rich.table import Table

from megatron_ext.compile.output_layer import place_output_layer
from megatron_ext.compile.program.graph import channels
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.measured_costs import measured_costs
from megatron_ext.runtime.executor import execute
from megatron_ext.runtime.held_bytes import SavedTensors
from megatron_ext.runtime.measure.measured_steps import KEPT, MeasuredSteps
from megatron_ext.runtime.measure.profile import STEPS, Profile
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.transport import Boundary, Transport
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.recording import clock_of
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.runtime.world import gather_from_all
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.costs_text import format_costs
from megatron_ext.schedule.problem import Problem
from megatron_ext.viz.prediction import Comparison
from scripts.benchmarks.contestants import EmulatedStage, in_seconds
from scripts.benchmarks.emulated import DTYPE, SHAPE, EmulatedChunk
from scripts.benchmarks.runs import on_forked_ranks

CPU = torch.device("cpu")
SCHEDULES = "1f1b zb-h1 zb-auto interleaved-zb zb-v v-half"


@dataclass(frozen=True)
class Result:
    """One schedule. ``asked``: what the passes slept for; ``measured``: what they took."""

    schedule: str
    asked: str
    measured: str
    error: float
    comparison: Comparison


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", "-m", type=int, default=8)
    parser.add_argument("--costs", default="f=60,i=80,w=40", help="milliseconds, of a full rank")
    parser.add_argument("--schedules", default=SCHEDULES)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    arguments = parser.parse_args(argv)
    results = [
        measure(spec, arguments.pp, arguments.microbatches, arguments.costs)
        for spec in arguments.schedules.split()
    ]
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return 0
    table = Table(*("schedule", "predicted, s", "measured, s", "error", "idle, predicted", "idle"))
    for result in results:
        comparison = result.comparison
        table.add_row(
            result.schedule,
            *(f"{seconds:.3f}" for seconds in (comparison.predicted, comparison.measured)),
            f"{result.error:+.1%}",
            *(f"{share:.1%}" for share in comparison.bubble_shares),
        )
    Console().print(table)
    return 0


def measure(spec: str, ranks: int, microbatches: int, costs: str) -> Result:
    """Fork the ranks, and return the result of the first one."""
    return on_forked_ranks(ranks, lambda: _run(spec, microbatches, costs))


def _run(spec: str, microbatches: int, text: str) -> Result:
    world = dist.group.WORLD
    assert world is not None
    rank, choice = world.rank(), choose(spec)
    placement = choice.place(world.size())
    slept = in_seconds(text, placement)
    boundary = Boundary(SHAPE, DTYPE)
    wrong = uniform(placement, 0.05, 0.05, 0.05)
    program = place_output_layer(choice, Problem(placement, microbatches, wrong))
    ways = Channels(world, channels(program.schedule), CPU)
    recorder = Recorder(rank)
    stages = {
        number: EmulatedStage(
            number, EmulatedChunk(number, slept), has_loss=placement.is_last(number)
        )
        for number in placement.stages_of[rank]
    }

    def step(program: Program) -> None:
        queue.splitting = choice.traits.splits_backward
        execute(program, stages, Transport(ways, boundary, placement, recorder), recorder)
        queue.splitting = False

    profile = Profile(clock_of(CPU), SavedTensors([]))
    for _ in range(STEPS):
        profile.begin(recorder)
        step(program)
        profile.end(recorder, program)
        recorder.end()
    ranks = gather_from_all(profile.figures(ways, world, boundary, by_place=False))
    measured = measured_costs(profile.program, wrong, ranks, spec)
    program = place_output_layer(choice, Problem(placement, microbatches, measured))
    steps = MeasuredSteps(CPU)
    for _ in range(KEPT):
        steps.begin(recorder)
        step(program)
        steps.end(program)
        recorder.end()
    comparison = steps.compare(world)
    assert comparison is not None
    return Result(spec, format_costs(slept), format_costs(measured), comparison.error, comparison)


if __name__ == "__main__":
    sys.exit(main())
