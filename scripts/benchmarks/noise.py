"""Cost of noise for each schedule, and gain of W passes that run earlier than planned.

    python -m scripts.benchmarks.noise
    python -m scripts.benchmarks.noise --pp 4 -m 16 --noise 0.1,ranks=0.05 --schedules v-auto@3

Passes vary as with `megatron-ext simulate --noise`, and their order is fixed, as in training. In
addition, a rank whose next message is late runs the next W in the meantime, if its I is done. It
runs no W later than planned, and all other passes in their order, so it never holds more memory.
Two variants are simulated. `whole`: a W that has begun ends before anything else runs, even if the
message comes. `in parts`: W stops when the message comes, and continues later. A W is one product a
layer, so a rank that checks for messages between products is close to this.
"""

from __future__ import annotations

import argparse
import enum
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.noise import Noise, Quantiles, factors_of, spread
from megatron_ext.compile.program.simulate import seconds_of, simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.columns import IS_PASS
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.problem import Problem
from megatron_ext.viz.noise_text import parse_noise
from megatron_ext.viz.replay import Replay

# With the memory limits within which v-auto searches.
SCHEDULES: tuple[tuple[str, str | None], ...] = (
    ("1f1b", None),
    ("interleaved", None),
    ("zb-h1", None),
    ("zb-h2", None),
    ("interleaved-zb", None),
    ("v-half", None),
    ("zb-v", None),
    ("v-auto", "5"),
    ("v-auto", "6"),
    ("v-auto", "8"),
)
NOISES = ("0.02", "0.05", "0.1", "0.2", "0,ranks=0.05", "0.1,ranks=0.05")
SAMPLES = 200


class WeightGradients(enum.Enum):
    """Times at which W may run while its rank waits for a message."""

    AS_PLANNED = "not"
    WHOLE = "whole"
    IN_PARTS = "in parts"


@dataclass(frozen=True)
class Row:
    """Makespans in the unit of the costs; ``whole`` and ``in_parts`` are those with early W."""

    schedule: str
    noise: str
    planned: float
    fixed: Quantiles
    whole: Quantiles | None
    in_parts: Quantiles | None


class Ranks:
    """The passes of ``program`` run by ranks that decide for themselves when a W runs.

    A message leaves when the pass that makes it has ended, and takes its hop."""

    def __init__(self, program: Program) -> None:
        schedule, self.hop = program.schedule, program.problem.costs.links.hop
        passes = [action for row in schedule.compute_rows for action in row]
        number = {action: n for n, action in enumerate(passes)}
        self.rank = [schedule.placement.rank_of[action.stage] for action in passes]
        inputs = Replay(schedule).inputs
        self.makers = [[number[maker] for maker in inputs[action]] for action in passes]
        self.rows = [_Row(row, number) for row in schedule.compute_rows]

    def makespan(self, seconds: Sequence[float], early: WeightGradients) -> float:
        """Return the makespan of one step whose passes take ``seconds``, in the order of the
        rows."""
        return _Step(self, seconds, early).run()


class _Row:
    """The passes of a rank. ``others`` are in order, and ``due[i]`` is the number of W that are
    planned before the i-th of them. ``weights`` are in order, and ``after[w]`` is the number of
    others that must have run before."""

    def __init__(self, row: Sequence[Action], number: dict[Action, int]) -> None:
        self.others: list[int] = []
        self.weights: list[int] = []
        self.due: list[int] = []
        self.after: list[int] = []
        place: dict[Action, int] = {}
        for action in row:
            if action.kind is Kind.BACKWARD_WEIGHT:
                i = action._replace(kind=Kind.BACKWARD_INPUT)
                self.weights.append(number[action])
                self.after.append(place[i] + 1)
            else:
                place[action] = len(self.others)
                self.others.append(number[action])
                self.due.append(len(self.weights))
        self.due.append(len(self.weights))


class _Step:
    """One step under way: ranks take turns in the order of time."""

    def __init__(self, ranks: Ranks, seconds: Sequence[float], early: WeightGradients) -> None:
        self.ranks, self.left, self.early = ranks, list(seconds), early
        self.end: list[float | None] = [None] * len(seconds)  # of passes that have begun
        self.waiting: dict[int, list[int]] = {}  # by a pass that has not, ranks
        self.next = [[0, 0] for _ in ranks.rows]  # by rank, the next of the others, the next W
        self.free = [0.0] * len(ranks.rows)  # when each rank's last pass ends
        self.turns = [(0.0, rank) for rank in range(len(ranks.rows))]

    def run(self) -> float:
        while self.turns:
            now, rank = heapq.heappop(self.turns)
            self._take_turn(now, rank)
        return max(self.free)

    def _take_turn(self, now: float, rank: int) -> None:
        row, (other, weight) = self.ranks.rows[rank], self.next[rank]
        if self.early is WeightGradients.IN_PARTS:
            weight = self._spend(now, rank)
        if weight < row.due[other]:
            self._run_weight(max(now, self.free[rank]), rank)
            return
        if other == len(row.others):
            return
        here = row.others[other]
        missing = next((m for m in self.ranks.makers[here] if self.end[m] is None), None)
        arrival = now if missing is not None else self._arrival(here, rank)
        if missing is None and arrival <= now:
            self.next[rank][0] += 1
            self._begin(here, now, rank)
        elif self.early is WeightGradients.WHOLE and self._has_weight(rank):
            self._run_weight(now, rank)
        elif missing is not None:
            self.waiting.setdefault(missing, []).append(rank)
        else:
            heapq.heappush(self.turns, (arrival, rank))

    def _arrival(self, here: int, rank: int) -> float:
        """Return when all inputs of pass ``here`` have arrived, whose makers have begun."""
        arrival = 0.0
        for maker in self.ranks.makers[here]:
            end = self.end[maker]
            assert end is not None
            arrival = max(arrival, end + self.ranks.hop * (self.ranks.rank[maker] != rank))
        return arrival

    def _has_weight(self, rank: int) -> bool:
        row, (other, weight) = self.ranks.rows[rank], self.next[rank]
        return weight < len(row.weights) and row.after[weight] <= other

    def _run_weight(self, now: float, rank: int) -> None:
        _, weight = self.next[rank]
        self.next[rank][1] += 1
        self._begin(self.ranks.rows[rank].weights[weight], now, rank)

    def _begin(self, here: int, now: float, rank: int) -> None:
        end = now + self.left[here]
        self.end[here] = self.free[rank] = end
        heapq.heappush(self.turns, (end, rank))
        for waiter in self.waiting.pop(here, ()):
            heapq.heappush(self.turns, (now, waiter))  # it looks again, and knows when to come

    def _spend(self, now: float, rank: int) -> int:
        """Run parts of W in what ``rank`` has idled up to ``now``; the next W."""
        idle = now - self.free[rank]
        while idle > 0 and self._has_weight(rank):
            here = self.ranks.rows[rank].weights[self.next[rank][1]]
            part = min(idle, self.left[here])
            self.left[here] -= part
            idle -= part
            if self.left[here] <= 0:
                self.next[rank][1] += 1
        self.free[rank] = max(self.free[rank], now)
        return self.next[rank][1]


def row_of(name: str, program: Program, text: str, noise: Noise, samples: int) -> Row:
    columns = program.schedule.columns
    planned = simulate(program, program.problem.costs).makespan
    fixed = spread(program, noise, samples).makespan
    has_weights = any(kind is Kind.BACKWARD_WEIGHT for _, kind in columns.pairs)
    if not has_weights:
        return Row(name, text, planned, fixed, None, None)
    seconds = np.array(seconds_of(program.graph, program.schedule, program.problem.costs))
    is_pass = IS_PASS[columns.kind]
    steps = [
        sample
        for factors in factors_of(columns, noise, samples)
        for sample in (seconds * factors)[:, is_pass].tolist()
    ]
    ranks = Ranks(program)
    planned_order, whole, in_parts = (
        _quantiles([ranks.makespan(step, early) for step in steps]) for early in WeightGradients
    )
    return Row(
        name,
        text,
        planned,
        fixed,
        _scaled(fixed, planned_order, whole),
        _scaled(fixed, planned_order, in_parts),
    )


def _quantiles(makespans: Sequence[float]) -> Quantiles:
    return Quantiles(*map(float, np.quantile(makespans, (0.5, 0.9))))


def _scaled(fixed: Quantiles, before: Quantiles, after: Quantiles) -> Quantiles:
    """Return ``fixed`` scaled by the ratio of ``after`` to ``before``."""
    return Quantiles(
        fixed.median * after.median / before.median, fixed.p90 * after.p90 / before.p90
    )


def rows(
    schedules: Sequence[tuple[str, str | None]],
    noises: Sequence[str],
    ranks: int,
    microbatches: int,
    costs: str,
    samples: int,
) -> Iterator[Row]:
    for spec, limit in schedules:
        choice = choose(spec)
        placement = choice.place(ranks)
        within = None if limit is None else parse_limit(limit, ranks, microbatches)
        problem = Problem(placement, microbatches, parse_costs(costs, placement), within)
        program = build_program(choice, problem)
        name = spec if limit is None else f"{spec}, limit {limit}"
        for text in noises:
            yield row_of(name, program, text, parse_noise(text), samples)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What noise costs schedules, and W early wins.")
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("-m", "--microbatches", type=int, default=32)
    parser.add_argument("--costs", default="f=10,i=12,w=8,comm=1")
    parser.add_argument("--noise", nargs="+", default=NOISES, help="as of simulate --noise")
    parser.add_argument(
        "--schedules", nargs="+", help="NAME or NAME@LIMIT, by default some at their limits"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES)
    given = parser.parse_args(words)
    schedules = SCHEDULES
    if given.schedules:
        parts = (name.partition("@") for name in given.schedules)
        schedules = tuple((name, limit or None) for name, _, limit in parts)
    made = rows(schedules, given.noise, given.pp, given.microbatches, given.costs, given.samples)
    console = Console(stderr=True)
    total = len(schedules) * len(given.noise)
    found = list(track(made, "simulating", total=total, console=console, transient=True))
    _print(found)
    return 0


def _print(found: Sequence[Row]) -> None:
    columns = ("W early, whole", "90%", "in parts", "90%")
    table = Table("schedule", "noise", "planned", "median", "90%", *columns, box=None)
    for row in found:
        cells = [row.schedule, row.noise, f"{row.planned:.6g}"]
        cells += [f"{figure / row.planned - 1:+.1%}" for figure in _figures(row.fixed)]
        for early in (row.whole, row.in_parts):
            cells += (
                ["", ""]
                if early is None
                else [
                    f"{now / then - 1:+.1%}"
                    for now, then in zip(_figures(early), _figures(row.fixed), strict=True)
                ]
            )
        table.add_row(*cells)
    Console(width=120).print(table)


def _figures(quantiles: Quantiles) -> tuple[float, float]:
    return quantiles.median, quantiles.p90


if __name__ == "__main__":
    raise SystemExit(main())
