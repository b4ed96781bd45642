"""What there is to say of a schedule, as data for programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatron_ext.schedule.build.build import build_program
from megatron_ext.schedule.build.registry import Choice
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.program.memory import in_microbatches, peak_on_host, peaks
from megatron_ext.schedule.program.simulate import simulate, step_seconds
from megatron_ext.schedule.program.verify import Program
from megatron_ext.schedule.schedule import bitwise_order


def report(choice: Choice, problem: Problem) -> tuple[Program, dict[str, Any]]:
    """Build, prove and simulate ``choice``; times are in the unit of the costs. ``step`` is what a
    step costs: the makespan, or where steps overlap about the span.

    Raises:
        InvalidSchedule: it does not solve the problem, or not within its memory limit.
    """
    return report_of(choice, lambda: build_program(choice, problem))


def report_of(choice: Choice, make: Callable[[], Program]) -> tuple[Program, dict[str, Any]]:
    """`report` of the program of ``choice`` that ``make`` returns."""
    start = time.perf_counter()
    program = make()
    seconds = time.perf_counter() - start
    problem = program.problem
    timeline = simulate(program, program.problem.costs)
    schedule = program.schedule
    return program, {
        "schedule": choice.spec,
        "pp": problem.ranks,
        "vpp": problem.placement.chunks,
        "microbatches": problem.microbatches,
        "vocabulary": problem.extras.vocabulary.value,
        "offload": problem.extras.offload.value,
        "post_validation": problem.extras.post_validation,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "step": step_seconds(program, problem.costs),
        "work": timeline.work,
        "bubble_share_makespan": timeline.bubble_share_makespan,
        "bubble_share_span": timeline.bubble_share_span,
        "peak_activation_microbatches": peaks(schedule, in_microbatches(schedule)),
        "host_microbatches": [peak_on_host(row, schedule.placement) for row in schedule.rows],
        "memory_limit": None if problem.memory_limit is None else str(problem.memory_limit),
        "bitwise_order": bitwise_order(schedule),
        "generation_seconds": seconds,
    }
