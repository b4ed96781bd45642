"""Choice whether the output layer's weight gradient waits for W, or is computed in I.

Between I and W the output layer holds the gradient of the logits, which can be larger than the
activations of all layers of a stage. The weight gradient therefore waits for W only if the costs
show that there is enough memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megatron_ext.compile.build import build_program, complete
from megatron_ext.compile.program.memory import in_bytes, peaks
from megatron_ext.compile.program.simulate import step_seconds
from megatron_ext.compile.program.verify import InvalidSchedule, Program
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.compile.transforms.vocabulary_costs import share_vocabulary
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.problem import Problem, VocabularyParallel


def place_output_layer(resolved: ResolvedSpec, problem: Problem) -> Program:
    """Return the program with the output layer's weight gradient in I or in W, whichever is faster.

    The gradient is deferred to W only if the memory allows that: within a memory limit in bytes, or
    without a limit, if the peak of the rank with the output layer stays within the other ranks'
    largest peak. If ``problem`` does not give the output layer's costs and bytes, the gradient is
    computed in I, and the costs are used as they are.

    Raises:
        InvalidSchedule: as `build_program`, with the gradient in I.
    """
    return _better_placed(
        partial(build_program, resolved), problem, resolved.traits.splits_backward
    )


def better_of(now: Program, before: Program, resolved: ResolvedSpec, problem: Problem) -> Program:
    """Return the faster of two programs after costs have changed: ``now``, or ``before`` rebuilt.

    A family that searches does not always find the best order of passes, so an order found for
    other costs may be better.

    Args:
        now: result of `place_output_layer` for ``resolved`` and ``problem``.
        before: a program of ``resolved`` for other costs, whose order of passes is tried.
    """
    if problem.options.vocab_parallel is not VocabularyParallel.NONE:
        # The rows of ``before`` contain passes of vocabulary parallelism, so its order cannot be
        # used.
        return now
    if problem.first_trained_stage:
        # The rows of ``before`` lack the passes of frozen stages, so its order cannot be used.
        return now
    passes = replace(before.schedule, rows=before.schedule.compute_rows)
    try:
        rebuilt = _better_placed(
            partial(complete, passes), problem, resolved.traits.splits_backward
        )
    except InvalidSchedule:
        return now
    return rebuilt if _seconds(rebuilt) < _seconds(now) else now


def _better_placed(build: Callable[[Problem], Program], problem: Problem, splits: bool) -> Program:
    """Return the program of ``build`` with the output layer's weight gradient in I or in W.

    The choice is that of `place_output_layer`. ``splits`` says whether the schedule has W at all.
    """
    costs = problem.costs
    shared = problem.options.vocab_parallel is not VocabularyParallel.NONE
    if shared or not splits or costs.vocabulary is None:
        return build(problem)
    at_once = build(replace(problem, costs=with_input_gradient(costs)))
    could_wait = costs.vocabulary.output_layer[2] and costs.vocabulary.deferred_bytes
    if costs.held_bytes is None or not could_wait or problem.forward_only:
        return at_once
    try:
        later = build(problem)
    except InvalidSchedule:
        return at_once
    is_sooner = _seconds(later) < _seconds(at_once)
    return later if is_sooner and _fits(later) else at_once


def output_layer_waits(program: Program) -> bool:
    """Return whether ``program`` defers the output layer's weight gradient to W, by its costs."""
    problem = program.problem
    if (
        problem.options.vocab_parallel is not VocabularyParallel.NONE
        or problem.costs.vocabulary is None
    ):
        return False
    _, _, weight_gradient = problem.costs.vocabulary.output_layer
    row = program.schedule.rows[problem.placement.rank_of[-1]]
    return weight_gradient > 0 and any(action.kind is Kind.BACKWARD_WEIGHT for action in row)


def costs_in(program: Program, costs: Costs) -> Costs:
    """Return ``costs`` with the output layer's weight gradient counted where ``program`` computes
    it.

    That is in I (input gradient) or in W (weight gradient).
    """
    problem = program.problem
    if problem.options.vocab_parallel is not VocabularyParallel.NONE:
        return share_vocabulary(costs, problem.placement, problem.options.vocab_parallel)
    if output_layer_waits(program) or costs.vocabulary is None:
        return costs
    return with_input_gradient(costs)


def with_input_gradient(costs: Costs) -> Costs:
    """Return ``costs`` with the output layer's weight gradient counted in I instead of W.

    Costs without its seconds are returned unchanged.
    """
    if costs.vocabulary is None or not costs.vocabulary.output_layer[2]:
        return costs
    forward, input_gradient, weight_gradient = costs.vocabulary.output_layer
    seconds = dict(costs.seconds)
    seconds[Kind.BACKWARD_INPUT] = _last_plus(seconds[Kind.BACKWARD_INPUT], weight_gradient)
    seconds[Kind.BACKWARD_WEIGHT] = _last_plus(seconds[Kind.BACKWARD_WEIGHT], -weight_gradient)
    held = costs.held_bytes
    if held is not None:
        rest = _last_plus(held[Held.WEIGHT_INPUTS], -costs.vocabulary.deferred_bytes)
        held = {**held, Held.WEIGHT_INPUTS: rest}
    fixed = dict(costs.slices.fixed)
    fixed_forward, fixed_input, fixed_weight = costs.vocabulary.fixed_output_layer
    if fixed_weight:
        none = (0.0,) * costs.stages
        for kind, more in (
            (Kind.BACKWARD_INPUT, fixed_weight),
            (Kind.BACKWARD_WEIGHT, -fixed_weight),
        ):
            fixed[kind] = _last_plus(fixed.get(kind, none), more)
    vocabulary = replace(
        costs.vocabulary,
        output_layer=(forward, input_gradient + weight_gradient, 0.0),
        fixed_output_layer=(fixed_forward, fixed_input + fixed_weight, 0.0),
        deferred_bytes=0.0,
    )
    changed = costs.with_passes(seconds=seconds, held_bytes=held).with_slices(fixed=fixed)
    return replace(changed, vocabulary=vocabulary).with_copies_of(costs)


def _last_plus(figures: tuple[float, ...], more: float) -> tuple[float, ...]:
    # Rounding may make the remaining time or memory of the last stage slightly negative.
    return (*figures[:-1], max(figures[-1] + more, 0.0))


def _fits(program: Program) -> bool:
    problem = program.problem
    if problem.memory_limit is not None and problem.memory_limit.bytes is not None:
        return True  # the proof has compared the program's bytes with the limit
    held = peaks(program.schedule, in_bytes(problem.costs))
    with_loss = problem.placement.rank_of[-1]
    return held[with_loss] <= max(held[:with_loss] + held[with_loss + 1 :], default=0.0)


def _seconds(program: Program) -> float:
    return step_seconds(program, program.problem.costs)
