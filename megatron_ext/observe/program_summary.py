"""Predicted time and memory of a program, in one line.

A training logs one line when it begins to run a program, or when measured costs have changed it.
The line has what a user would otherwise have to simulate: the bubble next to that of 1F1B, the peak
memory, and the origin of the costs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from megatron_ext.base.words import bytes_text, counted
from megatron_ext.compile.build import build_program
from megatron_ext.compile.output_layer import costs_in, output_layer_waits
from megatron_ext.compile.overlap import what_overlapping_gains
from megatron_ext.compile.program.memory import (
    in_bytes,
    in_microbatches,
    peak_on_host,
    peaks,
    recomputed_share,
)
from megatron_ext.compile.program.simulate import simulate, step_seconds
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.costs_text import outline_costs
from megatron_ext.schedule.kinds import RULES, Held, Lane
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Offload, Problem
from megatron_ext.schedule.stock_executor import STOCK_EXECUTOR
from megatron_ext.schedule.timeline import Timeline


def program_of_1f1b(problem: Problem) -> Program:
    """Return the program of Megatron's own 1F1B for the same ranks, microbatches and costs."""
    costs = (problem.costs.unpartitioned or problem.costs).per_rank(problem.placement)
    on_line = Problem(line(problem.ranks), problem.microbatches, costs, stock=STOCK_EXECUTOR)
    return build_program(choose("1f1b"), on_line)


def stock_1f1b(problem: Problem) -> Timeline:
    """Return the predicted timeline of Megatron's own 1F1B for this problem."""
    program = program_of_1f1b(problem)
    return simulate(program, program.problem.costs)


def summary_of_change(before: Program, now: Program, costs: Costs) -> str:
    """Return a sentence that compares two programs of a training after costs were measured.

    ``before`` was made with estimated costs, ``now`` with the measured ``costs``. Both are
    simulated with the measured costs.
    """
    stock = stock_1f1b(replace(now.problem, costs=costs)).makespan

    def promise(program: Program) -> str:
        gain = stock / step_seconds(program, costs_in(program, costs)) - 1
        schedule = program.schedule
        pace = "slower" if gain < 0 else "faster"
        peak = counted(max(peaks(schedule, in_microbatches(schedule))), "microbatch")
        return f"{abs(gain):.1%} {pace} than 1F1B, peak {peak}"

    was = f"was {promise(before)} with estimated costs"
    passes = [(made.schedule.compute_rows, output_layer_waits(made)) for made in (before, now)]
    if passes[0] == passes[1]:
        was = "as with estimated costs"
    name = now.schedule.name
    return f"{name}, measured costs: predicted {promise(now)} ({was})"


def summarize(program: Program) -> str:
    """Return a line on ``program``: its predicted bubble and 1F1B's, its peak memory, its costs."""
    problem = program.problem
    costs = problem.costs
    bubble = simulate(program, costs).bubble_share_makespan
    stock = stock_1f1b(problem).bubble_share_makespan
    peak = max(peaks(program.schedule, in_microbatches(program.schedule)))
    held = ""
    if costs.held_bytes is not None:
        held = f" ({bytes_text(max(peaks(program.schedule, in_bytes(costs))))})"
    offloads = problem.options.activation_offload is not Offload.NONE
    outlined = outline_costs(costs, program.schedule.placement, with_copies=offloads)
    predicted = f"predicted bubble {bubble:.1%} of the makespan (1f1b {stock:.1%})"
    basis = f"costs {costs.origin} (of a microbatch on one rank): {outlined}"
    if costs.no_estimate:
        predicted, basis = "no estimate of its bubble", f"no estimate: {costs.no_estimate}"
    return (
        f"{program.schedule.name} on {counted(problem.ranks, 'rank')}, "
        f"{counted(problem.microbatches, 'microbatch')}{_of_slices(problem)}: "
        f"{predicted}, peak {counted(peak, 'microbatch')}{held}"
        f"{_frozen_part(problem)}{_offloaded_part(program)}{_recomputed_part(program)}"
        f"{_paired_part(program)}"
        f"{_what_overlaps(program)}; {basis}"
    )


def _of_slices(problem: Problem) -> str:
    if problem.slices.count == 1:
        return ""
    ends = [0.0, *problem.slice_ends]
    shares = [f"{end - begin:.0%}" for begin, end in pairwise(ends)]
    return f" in {problem.slices.count} slices ({' '.join(shares)} of the sequence)"


def _what_overlaps(program: Program) -> str:
    problem = program.problem
    if not problem.options.steps_overlap or problem.costs.no_estimate:
        return ""
    return f"; {what_overlapping_gains(program)}"


def _frozen_part(problem: Problem) -> str:
    match problem.first_trained_stage:
        case 0:
            return ""
        case 1:
            return "; stage 0 has nothing to train, and forward passes alone"
    last = problem.first_trained_stage - 1
    return f"; stages 0 to {last} have nothing to train, and forward passes alone"


def _paired_part(program: Program) -> str:
    pairs = len(program.schedule.pairs)
    forwards = program.problem.placement.stages * program.problem.pieces
    return f"; {pairs} of {forwards} forward passes overlap a backward pass" if pairs else ""


def _recomputed_part(program: Program) -> str:
    share = recomputed_share(program.schedule)
    return f"; {share:.0%} of the activations are recomputed" if share else ""


def _offloaded_part(program: Program) -> str:
    """Return words on the share of activations that the program offloads; "" without offload."""
    if program.problem.options.activation_offload is Offload.NONE:
        return ""
    made, left = Counter[Held](), Counter[Held]()
    for action in (action for row in program.schedule.rows for action in row):
        rule = RULES[action.kind]
        if rule.lane is Lane.TO_HOST:
            left.update(rule.moves)
        elif rule.lane is Lane.COMPUTE:
            made.update(rule.acquires)
    shares = [
        f"{left[held] / made[held]:.0%} of the {name}"
        for held, name in ((Held.ACTIVATION, "activations"), (Held.WEIGHT_INPUTS, "inputs of W"))
        if made[held]
    ]
    placement = program.schedule.placement
    on_host = max(peak_on_host(row, placement) for row in program.schedule.rows)
    return (
        f"; offload {program.problem.options.activation_offload}: {' and '.join(shares)} leave, "
        f"the rest stays (at most {counted(on_host, 'microbatch')} of a rank on the host)"
    )
