"""Report on a simulated schedule, as data for programs.

The command, the page and programs that read JSON show the same values. They are computed once,
under the names that ``--json`` prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from megatron_ext.base.progress import task
from megatron_ext.compile.build import build_program
from megatron_ext.compile.feature_settings import settings_of_options
from megatron_ext.compile.program.memory import (
    in_microbatches,
    peak_on_host,
    peaks,
    recomputed_share,
)
from megatron_ext.compile.program.simulate import simulate, step_seconds
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.schedule.problem import Offload, Problem, ScheduleOptions
from megatron_ext.schedule.schedule import bitwise_order


@dataclass(frozen=True)
class ScheduleReport:
    """Times and memory of a simulated schedule; ``--json`` prints these names in this order, and
    for ``options`` the settings that request them.

    Attributes:
        schedule: name of the schedule with its options, as chosen.
        makespan, span, step, work: times in the unit of the costs. ``step`` is the time of a step:
            the makespan, or about the span if steps overlap.
        peak_activation_microbatches: peak of each rank, in microbatches of a full rank.
        host_microbatches: largest number of offloaded microbatches of each rank on the host.
        recomputed: the share of activations that are recomputed.
        pairs: number of forward passes that run as one with a backward pass.
        generation_seconds: seconds to make the program.
    """

    schedule: str
    pp: int
    vpp: int
    microbatches: int
    options: ScheduleOptions
    makespan: float
    span: float
    step: float
    work: float
    bubble_share_makespan: float
    bubble_share_span: float
    peak_activation_microbatches: tuple[float, ...]
    host_microbatches: tuple[float, ...]
    recomputed: float
    pairs: int
    memory_limit: str | None
    bitwise_order: bool
    generation_seconds: float

    @property
    def slices(self) -> int:
        """Number of slices of a microbatch; 1 if microbatches are not cut."""
        return self.options.slices.count

    @property
    def share_in_pairs(self) -> float:
        """Share of the step's forward passes that overlap with a backward pass."""
        return self.pairs / (self.microbatches * self.slices * self.pp * self.vpp)

    @property
    def offloads(self) -> bool:
        """Whether the schedule offloads activations to the host."""
        return self.options.activation_offload is not Offload.NONE

    @property
    def peak(self) -> float:
        """Largest activation memory of a rank, in microbatches."""
        return max(self.peak_activation_microbatches)

    def as_data(self) -> dict[str, Any]:
        """Return the values by the names that ``--json`` prints."""
        data: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            data |= settings_of_options(value) if value is self.options else {field.name: value}
        return data


def report(
    resolved: ResolvedSpec,
    problem: Problem,
    build: Callable[[ResolvedSpec, Problem], Program] = build_program,
) -> tuple[Program, ScheduleReport]:
    """Build, prove and simulate the schedule ``resolved``; return its program and its report.

    Raises:
        InvalidSchedule: the schedule does not solve the problem, or not within its memory limit.
    """
    start = time.perf_counter()
    program = build(resolved, problem)
    seconds = time.perf_counter() - start
    problem = program.problem
    with task(f"simulating {resolved.spec}"):
        timeline = simulate(program, problem.costs)
        overlap = problem.options.steps_overlap
        step = step_seconds(program, problem.costs) if overlap else timeline.makespan
    schedule = program.schedule
    return program, ScheduleReport(
        schedule=resolved.spec,
        pp=problem.ranks,
        vpp=problem.placement.chunks,
        microbatches=problem.microbatches,
        options=problem.options,
        makespan=timeline.makespan,
        span=timeline.span,
        step=step,
        work=timeline.work,
        bubble_share_makespan=timeline.bubble_share_makespan,
        bubble_share_span=timeline.bubble_share_span,
        peak_activation_microbatches=tuple(peaks(schedule, in_microbatches(schedule))),
        host_microbatches=tuple(peak_on_host(row, schedule.placement) for row in schedule.rows),
        recomputed=recomputed_share(schedule),
        pairs=len(schedule.pairs),
        memory_limit=None if problem.memory_limit is None else str(problem.memory_limit),
        bitwise_order=bitwise_order(schedule),
        generation_seconds=seconds,
    )
