"""Times and memory of a long step of equal microbatches, from the repeating part of a shorter step.

A schedule for many microbatches repeats itself. A schedule of the same family for a few
microbatches, whose number leaves the same remainder when divided by the family's period, has the
same beginning, period and ending. The `repeating_part` of that shorter schedule gives the times and
memory of the long step exactly, up to rounding. It remains unknown whether the family really makes
that schedule for the long step: families that place W by the costs may not. Code that recommends a
long step therefore builds it whole first (`Simulated.has_all_microbatches`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_ext.base.words import bytes_text
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import Amount, held_during, in_bytes, in_microbatches
from megatron_ext.compile.program.repeating_part import SAME, RepeatingPart, repeating_part
from megatron_ext.compile.program.verify import InvalidSchedule, Program
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.compile.report import ScheduleReport, report
from megatron_ext.compile.size import check_size
from megatron_ext.schedule.action_arrays import KINDS, by_kind
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule

# Number of periods in the shortest step that is tried; each step tried after it has about twice as
# many.
_PERIODS = 5
_RECOMPUTES = by_kind(lambda rule: rule.repeats is not None)
_REPEATED = {rule.repeats for rule in RULES.values()}
_MADE = np.array([kind in _REPEATED for kind in KINDS])
# A long step is simulated in full if it has fewer microbatches than this multiple of a shorter
# step's.
_LONG = 1.5


@dataclass(frozen=True)
class Simulated:
    """Simulated times and memory of a step that may have many microbatches.

    Attributes:
        report: times, bubbles and other results of the step's simulation.
        held_bytes: the peak of each rank in bytes; None if the costs have no bytes.
        has_all_microbatches: whether all microbatches were built; if not, the figures are derived
            from the repeating part of a shorter step.
    """

    report: ScheduleReport
    held_bytes: tuple[float, ...] | None
    has_all_microbatches: bool


class HoldsMore(ValueError):
    """Refusal of a long step whose memory grows with each microbatch and soon exceeds the limit."""


def simulate_step(
    resolved: ResolvedSpec,
    problem: Problem,
    build: Callable[[ResolvedSpec, Problem], Program] = build_program,
    *,
    all_microbatches: bool = False,
    most: Sequence[float] | None = None,
) -> Simulated:
    """Return the simulated times and memory of schedule ``resolved`` for the step of ``problem``.

    They are derived from the repeating part of a step with fewer microbatches, if that step has
    one.

    Args:
        build: function that builds a program.
        all_microbatches: build all microbatches.
        most: bytes that each rank may hold, beyond which no long step is built whole; None: any
            number.

    Raises:
        HoldsMore: a step of fewer microbatches, all of which are held at the same time, exceeds
            ``most``.
        InvalidSchedule: as `report`. If a shorter step exceeds the memory limit, longer ones do
            too.
        ValueError: ``resolved`` has no schedule for ``problem``.
    """
    check_size(problem)
    is_fixed = resolved.traits.searches or resolved.microbatches is not None
    if not (all_microbatches or is_fixed):
        before: tuple[float, ...] | None = None
        for number in _fewer(resolved, problem):
            shorter = _shorter(resolved, problem, number, build)
            if shorter is None:
                break
            found = _by_repeating_part(*shorter, problem.microbatches, _period(resolved, problem))
            if found is not None:
                return found
            held = _held_bytes(shorter[0])
            if most is not None:
                _check_growth(before, held, most, number)
            before = held
    return simulated_in_full(resolved, problem, build)


def _check_growth(
    before: Sequence[float] | None,
    held: Sequence[float] | None,
    most: Sequence[float],
    microbatches: int,
) -> None:
    """Raise HoldsMore if a rank's memory grows with the microbatches and exceeds the allowed
    ``most``.

    ``held`` are the bytes of each rank in a step of ``microbatches``, ``before`` those in a shorter
    step.
    """
    if before is None or held is None:
        return
    for rank, (less, more, bound) in enumerate(zip(before, held, most, strict=True)):
        if less < more > bound:
            raise HoldsMore(
                f"the memory of rank {rank} grows with each microbatch, and with {microbatches} "
                f"microbatches exceeds the rank's limit by {bytes_text(more - bound)}"
            )


def _fewer(resolved: ResolvedSpec, problem: Problem) -> Iterator[int]:
    """Yield numbers of microbatches of shorter steps in which to look for a repeating part,
    ascending."""
    period = _period(resolved, problem)
    number = _PERIODS * period + problem.microbatches % period
    while _LONG * number <= problem.microbatches:
        yield number
        number += number // period * period


def _period(resolved: ResolvedSpec, problem: Problem) -> int:
    """Return the number of microbatches after which a schedule of the family may repeat itself."""
    group = re.search(r"\bgroup=(\d+)", resolved.spec)
    if group is not None and int(group[1]):
        return int(group[1])
    return math.ceil(problem.ranks / 2) if resolved.spec.startswith("gis-h") else problem.ranks


def _shorter(
    resolved: ResolvedSpec,
    problem: Problem,
    number: int,
    build: Callable[[ResolvedSpec, Problem], Program],
) -> tuple[Program, ScheduleReport] | None:
    """Return program and report of a step of only ``number`` microbatches; None if it is refused.

    Raises:
        InvalidSchedule: as `report`.
    """
    try:
        return report(resolved, replace(problem, microbatches=number), build)
    except InvalidSchedule:
        raise
    except ValueError:
        return None


def _by_repeating_part(
    program: Program, made: ScheduleReport, microbatches: int, period: int
) -> Simulated | None:
    """Return times and memory of a step of ``microbatches``, from the shorter step of ``program``.

    None if the shorter step does not determine them.
    """
    part = repeating_part(program, (1, period))
    if part is None:
        return None
    schedule, costs = program.as_run[0], program.problem.costs
    amounts = [in_microbatches(schedule)]
    if costs.held_bytes is not None:
        amounts.append(in_bytes(costs))
    if not all(_holds_as_much(schedule, part, amount) for amount in amounts):
        return None
    times = (microbatches - made.microbatches) // part.microbatches
    return Simulated(_with_periods(made, program, part, times), _held_bytes(program), False)


def _with_periods(
    made: ScheduleReport, program: Program, part: RepeatingPart, times: int
) -> ScheduleReport:
    """Return the report ``made`` of a short step, with its repeating part repeated ``times``
    more."""
    more = times * part.seconds
    makespan, span = made.makespan + more, made.span + more
    work = made.work + times * part.work / made.pp
    schedule, _ = program.as_run
    recomputes, originals = (flags[schedule.arrays.kind] for flags in (_RECOMPUTES, _MADE))
    counts = [
        int(flags.sum() + times * (flags & part.is_in_period).sum())
        for flags in (recomputes, originals)
    ]
    return replace(
        made,
        microbatches=made.microbatches + times * part.microbatches,
        makespan=makespan,
        span=span,
        step=makespan,
        work=work,
        bubble_share_makespan=1 - work / makespan,
        bubble_share_span=1 - work / span,
        recomputed=counts[0] / counts[1],
        pairs=made.pairs + times * int(part.is_in_period[schedule.paired].sum()),
    )


def _holds_as_much(schedule: Schedule, part: RepeatingPart, amount: Amount) -> bool:
    """Return whether each rank's memory is the same at the start and the end of the repeating
    part."""
    for row, (begin, end) in zip(schedule.rows, part.cuts, strict=True):
        before = list(held_during(row[:end], amount))
        if begin and abs(before[begin - 1] - before[-1]) > SAME * max(before):
            return False
    return True


def simulated_in_full(
    resolved: ResolvedSpec,
    problem: Problem,
    build: Callable[[ResolvedSpec, Problem], Program] = build_program,
) -> Simulated:
    """Return the simulated times and memory of schedule ``resolved``, with all microbatches built.

    Raises what `report` raises.
    """
    program, made = report(resolved, problem, build)
    return Simulated(made, _held_bytes(program), has_all_microbatches=True)


def _held_bytes(program: Program) -> tuple[float, ...] | None:
    costs = program.problem.costs
    if costs.held_bytes is None:
        return None
    amount = in_bytes(costs)
    return tuple(max(held_during(row, amount), default=0.0) for row in program.schedule.rows)
