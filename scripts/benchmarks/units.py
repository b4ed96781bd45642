"""Cases in which units of microbatches win: a chunk's parameters have to be gathered before it
runs.

    python -m scripts.benchmarks.units [--pp 4 8] [--vpp 2 4] [--gathers 0 10 50] [-m 4]

A rank keeps the parameters of the chunk that it last ran forward, and of the one that it last ran
backward, and gathers others before their pass (W needs none). Nothing hides a gather here: a pass
that needs one takes so much longer. So figures are the worst case, and the count what it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.placement import loop
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import is_compute

COSTS = (10, 12, 8, 1)  # F, I and W of a rank for a microbatch, and a hop


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pp", type=int, nargs="+", default=[4, 8], help="pipeline ranks")
    parser.add_argument("--vpp", type=int, nargs="+", default=[2, 4], help="chunks of a rank")
    parser.add_argument(
        "--gathers", type=float, nargs="+", default=[0, 2, 10], help="time of a rank's v gathers"
    )
    parser.add_argument("-m", type=int, default=4, help="microbatches, times the ranks")
    arguments = parser.parse_args()
    f, i, w, hop = COSTS
    print(f"F = {f}, I = {i}, W = {w} a rank and microbatch, hops of {hop}; makespans")
    for p in arguments.pp:
        for chunks in arguments.vpp:
            Console().print(table(p, chunks, arguments.m * p, arguments.gathers))


def table(p: int, chunks: int, m: int, gathers: Sequence[float]) -> Table:
    """Return the makespans of schedules by the time to gather all chunks of a rank."""
    problem = Problem(loop(p, vpp=chunks), m, uniform(loop(p, vpp=chunks), *COSTS))
    sizes = sorted({p, 3 * p // 2, 2 * p, m})
    specs = [*("interleaved", "interleaved-zb", "gis", "breadth-first")]
    result = Table("schedule", "peak", "gathers a rank", title=f"p = {p}, v = {chunks}, m = {m}")
    for seconds in gathers:
        result.add_column(f"{seconds:g}", justify="right")
    for spec in [*specs, *(f"units:u={size}" for size in sizes)]:
        separator = "," if ":" in spec else ":"
        program = build_program(choose(f"{spec}{separator}vpp={chunks}"), problem)
        peak = max(peaks(program.schedule, in_microbatches(program.schedule)))
        count = max(len(set(gathered(row))) for row in program.schedule.rows)
        makespans = [f"{makespan(program, seconds / chunks):g}" for seconds in gathers]
        result.add_row(spec, f"{peak:g}", str(count), *makespans)
    return result


def gathered(row: Sequence[Action]) -> Iterator[Action]:
    """Yield the passes of a rank before which it gathers a chunk's parameters."""
    kept: dict[bool, int] = {}
    for action in row:
        if is_compute(action) and action.kind is not Kind.BACKWARD_WEIGHT:
            is_forward = action.kind is Kind.FORWARD
            if kept.get(is_forward) != action.stage:
                yield action
            kept[is_forward] = action.stage


def makespan(program: Program, gather: float) -> float:
    """Return the makespan if a gather takes ``gather``, and its pass waits for all of it."""
    waits = {action for row in program.schedule.rows for action in gathered(row)}
    costs = program.problem.costs
    seconds = [costs.of(a) + gather * (a in waits) for a in program.graph.actions]
    starts, ends = program.graph.longest_paths(seconds)
    return max(ends) - min(starts)


if __name__ == "__main__":
    main()
