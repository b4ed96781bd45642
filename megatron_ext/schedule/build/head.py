"""Whether the output layer's weight gradient waits for W, or comes with I.

Between I and W the output layer keeps the gradient of the logits, which can be larger than all that
a stage's layers keep. So it waits only where the costs show that there is room for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.build.build import build_program
from megatron_ext.schedule.build.registry import Choice
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.problem import Problem, VocabularyParallel
from megatron_ext.schedule.program.memory import in_bytes, peaks
from megatron_ext.schedule.program.simulate import step_seconds
from megatron_ext.schedule.program.verify import InvalidSchedule, Program
from megatron_ext.schedule.transforms.vocabulary_costs import share_vocabulary


@dataclass(frozen=True)
class Placed:
    """A program, and whether in it the output layer's weight gradient waits for W."""

    program: Program
    head_waits: bool


def place_head(choice: Choice, problem: Problem) -> Placed:
    """The program of ``choice`` with the output layer's weight gradient where it takes less time.

    It waits for W only if it can within a memory limit in bytes, or, where there is none, without
    making the largest peak of the ranks larger than the others' peaks. Where ``problem`` does not
    tell the output layer's costs and bytes it comes with I, and the costs are taken as they are.

    Raises:
        InvalidSchedule: as `build_program`, when it comes with I.
    """
    costs = problem.costs
    shared = problem.extras.vocabulary is not VocabularyParallel.NONE
    if shared or not choice.splits_backward or costs.vocabulary is None:
        return Placed(build_program(choice, problem), head_waits=False)
    at_once = build_program(choice, replace(problem, costs=_with_input_gradient(costs)))
    if costs.held_bytes is None or not costs.vocabulary.logits_bytes or problem.forward_only:
        return Placed(at_once, head_waits=False)
    try:
        later = build_program(choice, problem)
    except InvalidSchedule:
        return Placed(at_once, head_waits=False)
    is_sooner = _seconds(later) < _seconds(at_once)
    return Placed(later, True) if is_sooner and _fits(later) else Placed(at_once, False)


def place_again(choice: Choice, problem: Problem, before: Placed) -> Placed:
    """`place_head` for other costs than those ``before`` was made with, or ``before``'s own order
    of passes where that takes less time: a family that searches does not always find the best.

    Raises:
        InvalidSchedule: as `place_head`.
    """
    now = place_head(choice, problem)
    if problem.extras.vocabulary is not VocabularyParallel.NONE:
        return now  # the rows of ``before`` have the vocabulary's passes in them
    schedule = before.program.schedule
    same = replace(schedule, rows=schedule.compute_rows)
    try:
        again = place_head(replace(choice, build=lambda problem: same), problem)
    except InvalidSchedule:
        return now
    return again if _seconds(again.program) < _seconds(now.program) else now


def costs_in(placed: Placed, costs: Costs) -> Costs:
    """``costs`` as the passes of ``placed`` have them: the output layer's where it is placed."""
    problem = placed.program.problem
    if problem.extras.vocabulary is not VocabularyParallel.NONE:
        return share_vocabulary(costs, problem.placement, problem.extras.vocabulary)
    if placed.head_waits or costs.vocabulary is None:
        return costs
    return _with_input_gradient(costs)


def _with_input_gradient(costs: Costs) -> Costs:
    """``costs`` with the output layer's weight gradient in I."""
    assert costs.vocabulary is not None
    forward, input_gradient, weight_gradient = costs.vocabulary.head
    seconds = dict(costs.seconds)
    seconds[Kind.BACKWARD_INPUT] = _last_plus(seconds[Kind.BACKWARD_INPUT], weight_gradient)
    seconds[Kind.BACKWARD_WEIGHT] = _last_plus(seconds[Kind.BACKWARD_WEIGHT], -weight_gradient)
    held = costs.held_bytes
    if held is not None:
        rest = _last_plus(held[Held.WEIGHT_INPUTS], -costs.vocabulary.logits_bytes)
        held = {**held, Held.WEIGHT_INPUTS: rest}
    vocabulary = replace(costs.vocabulary, head=(forward, input_gradient + weight_gradient, 0.0))
    changed = replace(costs, seconds=seconds, held_bytes=held, vocabulary=vocabulary)
    return changed.with_copies_of(costs)


def _last_plus(figures: tuple[float, ...], more: float) -> tuple[float, ...]:
    return (*figures[:-1], max(figures[-1] + more, 0.0))  # rounding may leave less than 0


def _fits(program: Program) -> bool:
    problem = program.problem
    if problem.memory_limit is not None and problem.memory_limit.bytes is not None:
        return True  # proved
    held = peaks(program.schedule, in_bytes(problem.costs))
    with_loss = problem.placement.rank_of[-1]
    return held[with_loss] <= max(held[:with_loss] + held[with_loss + 1 :], default=0.0)


def _seconds(program: Program) -> float:
    return step_seconds(program, program.problem.costs)
