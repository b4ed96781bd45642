"""Lengths of the slices of a sequence, given Megatron's settings.

A schedule knows slices as shares of a sequence. On a rank they are tokens, and their number has to
be a multiple of what context parallelism, sequence parallelism and quantised matrices require.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ext.compile.program.verify import Program
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.slices.running_slice import Span, spans
from megatron_ext.schedule.problem import Problem


def spans_of(program: Program, settings: Any, tokens: int, rank: int = 0) -> tuple[Span, ...]:
    """Return the slices into which ``program`` cuts sequences of ``tokens``; empty if it cuts none.

    ``settings`` are Megatron's arguments or a TransformerConfig. ``rank`` is this rank's number
    among the context-parallel ranks that share a sequence.

    Raises:
        ValueError: the sequence cannot be cut into slices of suitable lengths.
    """
    problem = program.problem
    if problem.slices.count == 1:
        return ()
    lengths = lengths_in(problem, settings, tokens)
    return spans(lengths, rank, settings.context_parallel_size)


def lengths_in(problem: Problem, settings: Any, tokens: int) -> tuple[int, ...]:
    """Return the number of tokens of each slice of a sequence of ``tokens``.

    Arguments and errors are those of `spans_of`.
    """
    return problem.slice_lengths(tokens, _multiple(settings))


def _multiple(settings: Any) -> int:
    """Return the number of tokens of which the length of a slice of a sequence must be a multiple.

    Context- and sequence-parallel ranks share a slice evenly, and quantised operands need whole
    blocks of rows.
    """
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
    """Return, for each slice of a sequence, the first dimension of the tensor sent between stages.

    The dimension is the slice's number of tokens on one rank.
    """
    assert boundary.shape is not None
    ranks = of_slices[0].length // boundary.shape[0]
    return tuple((span.end - span.begin) // ranks for span in of_slices)
