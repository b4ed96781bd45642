"""Measure how far a step is from what was predicted with costs measured in the same run.

    python -m scripts.benchmarks.prediction
    python -m scripts.benchmarks.prediction --schedules zb-v --costs f=60,i=70,w=50

Ranks whose passes sleep (as in `executors`) begin with a schedule made for wrong costs, F,
I and W alike. They measure what their passes cost as `--pipeline-costs profile` does, rebuild
the schedule, and run some more steps, of which the median makespan is compared with the
prediction. Sleeping takes no core, so a pipeline of four runs on two; the time of the host between
passes is in the measured step and not in the prediction.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_ext.compile.output_layer import place_output_layer
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.measured_costs import measured_costs
from megatron_ext.observe.prediction import Comparison
from megatron_ext.runtime.held_bytes import SavedTensors
from megatron_ext.runtime.measure.measured_steps import KEPT, MeasuredSteps
from megatron_ext.runtime.measure.profile import STEPS, Profile
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.recording import clock_of
from megatron_ext.runtime.world import gather_from_all
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.costs_text import format_costs
from megatron_ext.schedule.problem import Problem
from scripts.benchmarks.contestants import CPU, EmulatedRank
from scripts.benchmarks.emulated import DTYPE, SHAPE, in_seconds
from scripts.benchmarks.harness import arguments, print_table
from scripts.benchmarks.runs import on_forked_ranks

SCHEDULES = "1f1b zb-h1 zb-auto interleaved-zb zb-v v-half"


@dataclass(frozen=True)
class Result:
    """Measured and predicted steps of one schedule.

    Attributes:
        slept: costs, as text: the seconds that passes slept.
        measured: costs, as text: the seconds that the ranks measured for their passes.
        error: measured over predicted makespan, less 1.
    """

    schedule: str
    slept: str
    measured: str
    error: float
    comparison: Comparison


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(
        __doc__,
        argv,
        pp=(4, "pipeline ranks"),
        microbatches=(8, "of a step"),
        costs=("f=60,i=80,w=40", "milliseconds, of a full rank"),
        schedules=(SCHEDULES, "to measure"),
    )
    results = (
        measure(spec, given.pp, given.microbatches, given.costs) for spec in given.schedules.split()
    )
    rows = (
        (
            *(result.schedule, f"{result.comparison.predicted:.3f}"),
            *(f"{result.comparison.measured:.3f}", f"{result.error:+.1%}"),
            *(f"{share:.1%}" for share in result.comparison.bubble_shares),
        )
        for result in results
    )
    idle = ("idle, predicted", "idle, measured")
    print_table(("schedule", "predicted, s", "measured, s", "error", *idle), rows)
    return 0


def measure(spec: str, ranks: int, microbatches: int, costs: str) -> Result:
    """Run the schedule ``spec`` on forked ranks, and return the result of the first rank."""
    return on_forked_ranks(ranks, lambda: _run(spec, microbatches, costs))


def _run(spec: str, microbatches: int, text: str) -> Result:
    resolved = choose(spec)
    placement = resolved.place(dist.get_world_size())
    slept = in_seconds(text, placement)
    wrong = uniform(placement, 0.05, 0.05, 0.05)
    program = place_output_layer(resolved, Problem(placement, microbatches, wrong))
    emulated = EmulatedRank(program.schedule, slept)
    world, recorder = emulated.world, emulated.recorder
    profile = Profile(clock_of(CPU), SavedTensors([]))
    for _ in range(STEPS):
        profile.begin(recorder)
        emulated.step(program, resolved.traits.splits_backward)
        profile.end(recorder, program)
        recorder.end()
    boundary = Boundary(SHAPE, DTYPE)
    figures = profile.figures(emulated.channels, world, boundary, by_place=False)
    ranks = gather_from_all(figures)
    measured = measured_costs(profile.program, wrong, ranks, spec)
    program = place_output_layer(resolved, Problem(placement, microbatches, measured))
    steps = MeasuredSteps(CPU)
    for _ in range(KEPT):
        steps.begin(recorder)
        emulated.step(program, resolved.traits.splits_backward)
        steps.end(program)
        recorder.end()
    comparison = steps.compare(world)
    assert comparison is not None
    return Result(spec, format_costs(slept), format_costs(measured), comparison.error, comparison)


if __name__ == "__main__":
    sys.exit(main())
