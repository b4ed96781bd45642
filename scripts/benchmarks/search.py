"""Measure what the search finds on a V, and in which time.

    python -m scripts.benchmarks.search
    python -m scripts.benchmarks.search --cells 8:4 16:9 --millions 10 100

Costs are 10:12:8 for a rank's F, I and W, and 1 for a message; m = 4p (--microbatches-per-rank). A
cell is p:limit, the limit in microbatches. For each cell and each number of packed passes (in
millions), a row has the CPU seconds of the search alone, those of the whole schedule (with the
families from which the search starts, and the proof), the makespan, a lower bound, and the
difference between these two. The last column is the longest period that is proved to be too short
for a V within the limit whose steady state repeats one microbatch's passes; the proof ends after
--pattern-seconds. Without numba the search packs in plain Python. Compiling is not counted.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_ext.compile.build import complete
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import v
from megatron_ext.schedule.problem import Problem
from megatron_ext.search import best
from megatron_ext.search.bounds import lower_bound
from megatron_ext.search.effort import Effort, effort
from megatron_ext.search.job_shop import JobShop, Starts, job_shop_of
from megatron_ext.search.pack import Pack, Packed
from megatron_ext.search.v_patterns import excluded_period
from scripts.benchmarks.harness import arguments, print_table

COSTS = (10, 12, 8, 1)  # costs of F, I, W and of a message
CELLS = ("8:4", "8:5", "8:6", "8:8", "16:8", "16:9", "16:12", "16:16", "32:16", "32:18", "32:32")
MILLIONS = (10, 30, 100)


class Counted:
    """Counter of the passes that a search packs, and of CPU seconds from the first to the last."""

    def __init__(self, how: Effort) -> None:
        self.how, self.passes, self.first, self.last = how, 0, 0.0, 0.0

    def packer(self, shop: JobShop) -> Pack:
        pack = self.how.packer(shop)
        self.first = time.process_time()

        def counted(plan: Starts) -> Packed:
            packed = pack(plan)
            self.passes += plan.size
            self.last = time.process_time()
            return packed

        return counted


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(
        __doc__,
        argv,
        cells=(CELLS, "p:limit"),
        millions=(MILLIONS, "of passes"),
        microbatches_per_rank=(4, "m over p"),
        pattern_seconds=(3.0, "in which a shorter period is looked for"),
    )
    how = effort()
    how.packer(job_shop_of(problem_of(2, 2, 2.0)))  # compiles the packer before it is timed
    title = (
        f"costs {COSTS}, {how.name} effort's packer, {platform.machine()}, {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, numpy {np.__version__}"
    )

    def rows() -> Iterator[tuple[object, ...]]:
        for cell in given.cells:
            p, limit = cell.split(":")
            problem = problem_of(int(p), int(p) * given.microbatches_per_rank, float(limit))
            excluded = excluded_period(problem, given.pattern_seconds) or "-"
            for millions in given.millions:
                yield cell, problem.microbatches, *figures(problem, how, millions), excluded

    columns = ("M passes", "search, s", "all, s", "M passes/s", "makespan", "bound", "gap")
    print_table(("p:limit", "m", *columns, "excluded"), rows(), title)
    return 0


def problem_of(ranks: int, microbatches: int, limit: float) -> Problem:
    placement = v(ranks)
    return Problem(placement, microbatches, uniform(placement, *COSTS), MemoryLimit(limit))


def figures(problem: Problem, how: Effort, millions: float) -> tuple[str, ...]:
    passes = int(millions * 1e6)
    counted = Counted(how)
    start = time.process_time()
    schedule = best.searched(
        "v-auto", problem, replace(how, packer=counted.packer, least=passes, most=passes)
    )
    seconds = time.process_time() - start
    makespan = simulate(complete(schedule, problem), problem.costs).makespan
    bound = lower_bound(problem, splits_backward=True)
    search = counted.last - counted.first
    rate = counted.passes / search / 1e6 if search else 0.0
    return (
        *(f"{counted.passes / 1e6:.1f}", f"{search:.2f}", f"{seconds:.2f}", f"{rate:.1f}"),
        *(f"{makespan:g}", f"{bound:g}", f"{1 - bound / makespan:.1%}"),
    )


if __name__ == "__main__":
    raise SystemExit(main())
