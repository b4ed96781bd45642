"""How many tokens the slices of a sequence have, on this side of Megatron's settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.slices.running_slice import Span, spans
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.program.verify import Program


def spans_of(program: Program, settings: Any, tokens: int, rank: int = 0) -> tuple[Span, ...]:
    """The slices of a sequence of ``tokens`` in ``program``; none where microbatches are whole.

    ``settings`` are Megatron's arguments or a TransformerConfig; ``rank`` is the number of this one
    among those that share a sequence.

    Raises:
        ValueError: it cannot be cut so.
    """
    problem = program.problem
    if problem.slices.count == 1:
        return ()
    lengths = lengths_in(problem, settings, tokens)
    return spans(lengths, rank, settings.context_parallel_size)


def lengths_in(problem: Problem, settings: Any, tokens: int) -> tuple[int, ...]:
    """The tokens of each slice of a sequence of ``tokens``. Arguments and errors as of
    `spans_of`."""
    return problem.slice_lengths(tokens, _multiple(settings))


def _multiple(settings: Any) -> int:
    """What a slice is a multiple of: context and sequence parallel ranks share it, and quantised
    operands want as many rows as are scaled together."""
    ranks: int = settings.context_parallel_size
    if settings.sequence_parallel:
        ranks *= settings.tensor_model_parallel_size
    rows = 1
    if getattr(settings, "fp4", None) or getattr(settings, "fp8_recipe", None) == "mxfp8":
        rows = 32
    elif getattr(settings, "fp8", None):
        rows = 16
    return ranks * rows


def lengths_passed_on(boundary: Boundary, of_slices: Sequence[Span]) -> tuple[int, ...]:
    """The first dimension of what stages pass on, by slice: the tokens of a rank."""
    assert boundary.shape is not None
    ranks = of_slices[0].length // boundary.shape[0]
    return tuple((span.end - span.begin) // ranks for span in of_slices)
