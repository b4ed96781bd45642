"""Measure what making and proving a schedule takes, and how that grows.

    python -m scripts.benchmarks.schedules
    python -m scripts.benchmarks.schedules --family zb-auto --ranks 8 16 --microbatches

Two series for each family: p = 8 with m from 16 to 512, and p from 8 to 64 with m = 8p. Times are
CPU seconds, taken once. The exponent e is that of a power law fitted to them in log-log: seconds
grow as actions**e, where actions are all that the ranks do, messages and waits included. v-auto,
wave-auto and loop-auto, whose search is the same at any size, have p = 8 and m = 16 and 32 alone.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.compile.program.communication import communicate
from megatron_ext.compile.program.message_order import order_messages
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import prove
from megatron_ext.compile.program.waits import await_sends
from megatron_ext.compile.registry import choose, entries
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from scripts.benchmarks.harness import arguments, print_table

COSTS = (10, 12, 8, 1)  # costs of F, I, W and of a message
RANKS = (8, 16, 32, 64)
MICROBATCHES = (16, 32, 64, 128, 256, 512)
AT_LEAST = 0.05  # least seconds of a measurement that counts in the fit


@dataclass(frozen=True)
class Measured:
    """CPU seconds of each part of making one schedule.

    Attributes:
        actions: number of actions of all ranks, with messages and waits.
        generation: seconds to order the passes.
        communication: seconds to add messages and waits.
        proof: seconds to prove that the program is correct.
        simulation: seconds to simulate its step.
    """

    family: str
    ranks: int
    microbatches: int
    actions: int
    generation: float
    communication: float
    proof: float
    simulation: float

    @property
    def total(self) -> float:
        return self.generation + self.communication + self.proof + self.simulation


def measure(family: str, ranks: int, microbatches: int) -> Measured:
    resolved = choose(family)
    placement = resolved.place(ranks)
    problem = Problem(placement, microbatches, uniform(placement, *COSTS))
    seconds: list[float] = []

    def timed[T](step: Callable[[], T]) -> T:
        start = time.process_time()  # CPU time, as other processes may use the machine too
        result = step()
        seconds.append(time.process_time() - start)
        return result

    schedule = timed(lambda: resolved.build(problem))
    full = timed(
        lambda: await_sends(order_messages(communicate(schedule, problem), problem), problem)
    )
    program = timed(lambda: prove(full, problem))
    timed(lambda: simulate(program, problem.costs))
    actions = sum(map(len, program.schedule.rows))
    return Measured(family, ranks, microbatches, actions, *seconds)


def exponent(series: Sequence[Measured], seconds: Callable[[Measured], float]) -> float | None:
    """Return the exponent with which ``seconds`` grow with the number of actions.

    It is None if the seconds are too short to measure.
    """
    points = [(row.actions, seconds(row)) for row in series if seconds(row) >= AT_LEAST]
    if len({actions for actions, _ in points}) < 2:
        return None
    actions, times = np.log(np.array(points, dtype=float)).T
    return round(float(np.polyfit(actions, times, 1)[0]), 2)


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(
        __doc__,
        argv,
        family=(tuple(entries()), "to measure"),
        ranks=(RANKS, "p, with m = 8p"),
        microbatches=(MICROBATCHES, "m, with p = 8"),
    )
    sizes = {(8, m) for m in given.microbatches} | {(p, 8 * p) for p in given.ranks}
    grid = [
        (family, p, m)
        for family in given.family
        for p, m in sorted(sizes)
        if not entries()[family].traits.searches or (p == 8 and m <= 32)
    ]
    results: list[Measured] = []

    def rows() -> Iterator[tuple[object, ...]]:
        for family, p, m in grid:
            one = measure(family, p, m)
            results.append(one)
            seconds = (one.generation, one.communication, one.proof, one.simulation, one.total)
            per_action = f"{one.total / one.actions * 1e6:.0f}"
            yield family, p, m, one.actions, *(f"{figure:.2f}" for figure in seconds), per_action

    columns = ("generation", "communication", "proof", "simulation", "total", "us per action")
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    title = f"costs {COSTS}, {machine}, Python {platform.python_version()}"
    # The cache is empty here, so that a search does not find an earlier result.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        print_table(("family", "p", "m", "actions", *columns), rows(), title)
    heads = ("family", "e of generation", "e of the total", "with p: generation", "total")
    print_table(heads, (_growth(family, results) for family in given.family), "\nGrowth")
    return 0


def _growth(family: str, results: Sequence[Measured]) -> tuple[object, ...]:
    """Return the cells on ``family``: the exponents of its seconds' growth with m, and with p."""
    of_family = [row for row in results if row.family == family]
    with_m = [row for row in of_family if row.ranks == 8]
    with_p = [row for row in of_family if row.microbatches == 8 * row.ranks]
    fits = (
        exponent(series, seconds)
        for series in (with_m, with_p)
        for seconds in (lambda row: row.generation, lambda row: row.total)
    )
    return family, *("-" if fit is None else fit for fit in fits)


if __name__ == "__main__":
    sys.exit(main())
