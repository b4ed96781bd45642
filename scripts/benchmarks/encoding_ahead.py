"""Gain of a frozen tower that encodes ahead, in the bubbles of the first stage's own rank.

    python -m scripts.benchmarks.encoding_ahead

In simulation only: nothing trains so. The tower's pass of a microbatch is a pass of its own on the
rank of the first stage. It runs at the latest before that stage's F, and ahead of it wherever the
rank would wait as long as it takes. Layers, costs and memory are those of `uneven`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.planner.layouts.layout import Layout, evenly
from megatron_ext.planner.layouts.work import Work
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.viz.replay import Replay
from scripts.benchmarks.uneven import COSTS, LAYERS, RANKS, best_layout, without_bubble, work_of

SHARES = (0.05, 0.1, 0.2)  # of the language model's F
MICROBATCHES = 16
SPECS = {"zb-h1": RANKS, "zb-v": 2 * RANKS}


def makespan(work: Work, spec: str, layout: Layout, encode: float) -> float:
    """Return the step of ``work``, which has no tower, with a tower pass of ``encode`` seconds for
    each microbatch that runs ahead."""
    variant = work.variant(spec, layout)
    program = build_program(variant.choice, variant.problem)
    schedule, costs = program.schedule, program.problem.costs
    inputs, rank_of = Replay(schedule).inputs, schedule.placement.rank_of
    rows = [list(row) for row in schedule.compute_rows]
    first = rank_of[0]
    ends: dict[Action, float] = {}
    free = [0.0] * len(rows)
    encoded = 0  # microbatches, in order
    place = [0] * len(rows)

    def ready(action: Action) -> float | None:
        times = []
        for maker in inputs[action]:
            if maker not in ends:
                return None
            hop = costs.links.hop if rank_of[maker.stage] != rank_of[action.stage] else 0.0
            times.append(ends[maker] + hop)
        return max(times, default=0.0)

    while any(place[rank] < len(row) for rank, row in enumerate(rows)):
        for rank, row in enumerate(rows):
            while place[rank] < len(row):
                action = row[place[rank]]
                at = ready(action)
                if at is None:
                    break
                is_first_forward = (action.stage, action.kind) == (0, Kind.FORWARD)
                while rank == first and encoded < MICROBATCHES:
                    must = is_first_forward and action.microbatch >= encoded
                    if not must and free[rank] + encode > at:
                        break
                    free[rank] += encode
                    encoded += 1
                ends[action] = max(at, free[rank]) + costs.of(action)
                free[rank] = ends[action]
                place[rank] += 1
    return max(ends.values())


def main(words: Sequence[str]) -> int:
    table = Table(
        "frozen tower", "schedule", "even layers", "laid out", "ahead, even", "ahead, best"
    )
    for share in SHARES:
        encode = share * 10 * RANKS
        costs = f"{COSTS},tower={encode:g}/0/0"
        ideal = without_bubble(costs, MICROBATCHES)
        with_tower, without = work_of(costs, MICROBATCHES), work_of(COSTS, MICROBATCHES)
        for spec, stages in SPECS.items():
            even = evenly(LAYERS, stages)
            laid_out = best_layout(with_tower, spec, search=False)
            variant = with_tower.variant(spec, even)
            today = build_program(variant.choice, variant.problem)
            ahead = [makespan(without, spec, layout, encode) for layout in (even, laid_out.layout)]
            table.add_row(
                f"{share:.0%}",
                spec,
                f"{_makespan(today) / ideal:.3f}",
                f"{laid_out.seconds / ideal:.3f}",
                f"{ahead[0] / ideal:.3f}",
                f"{min(ahead) / ideal:.3f}",
            )
    Console().print(table)
    return 0


def _makespan(program: Program) -> float:
    return simulate(program, program.problem.costs).makespan


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
