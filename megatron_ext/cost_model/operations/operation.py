"""What a rank does with a microbatch in a part of a layer: its operations, and what it exchanges.

An operation has its floating-point operations, as Megatron's papers count them (Narayanan et al.
2021, appendix), and the bytes that it reads and writes in its GPU's memory. A product of matrices
costs the same forward, for its input's gradient and for its weight's; what has no weight has no W.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from megatron_ext.cost_model.execution import Execution, Precision
from megatron_ext.cost_model.operations.matrix_products import MatrixProduct

_QUANTIZED_BYTES = {Precision.FP8: 1.0, Precision.FP4: 0.5}  # of an element
_GRADIENT_BYTES = 8  # of an element of a weight's gradient, in fp32: it is read, and written


class Engine(StrEnum):
    """What an operation keeps busy, which has a rate of its own."""

    LINEAR = "layers' matrices"  # in the precision of the run
    MATRIX = "other matrices"  # in 16 bits: the router, the output layer
    GROUPED = "experts' matrices"
    ATTENTION = "attention"  # and what is in its place: recurrences
    MEMORY = "memory"  # element by element


@dataclass(frozen=True)
class Passes:
    """A figure for each of F, I and W."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0


@dataclass(frozen=True)
class Operation:
    """One operation on all tokens of a microbatch, on one rank.

    Attributes:
        flops: floating-point operations, as a model's are counted.
        moved: bytes to and from the GPU's memory.
        again: floating-point operations that its backward pass runs a second time by itself.
        modules: the names under which Megatron's selective recompute runs it again in I.
        is_whole: whether its W comes with its I, whatever schedules say.
        is_row: whether it is the last product of a pair that tensor-parallel ranks divide.
        squared: the share of its F and I that grows with the square of the sequence.
        product: the shape of a matrix product; None of other operations.
        operand_bytes: bytes of an element that a matrix product multiplies.
    """

    name: str
    engine: Engine
    flops: Passes = field(default_factory=Passes)
    moved: Passes = field(default_factory=Passes)
    again: float = 0.0
    modules: frozenset[str] = frozenset()
    is_whole: bool = False
    is_row: bool = False
    squared: float = 0.0
    product: MatrixProduct | None = None
    operand_bytes: float = 2.0


class Group(StrEnum):
    """Ranks that wait for one another within a pass."""

    TENSOR = "tensor-parallel"
    EXPERT = "expert-parallel"
    CONTEXT = "context-parallel"


@dataclass(frozen=True)
class Exchange:
    """What a rank exchanges with a group.

    Attributes:
        ranks, stride: of the group, and how far one lies from the next.
        moved: bytes in F and in I that were all ranks' were there no other; of which a rank keeps
            its own share.
        choices: how many ranks each token of `moved` goes to, once to each of them, and once over
            the network to each other node; 0: `moved` is divided over all ranks evenly.
        modules: as of an operation.
        is_behind_attention: whether it goes on while attention does.
        collectives: how many there are in F, and as many in I.
        halves: the same, an all-reduce counted as two: a reduce-scatter and a gather.
    """

    group: Group
    ranks: int
    stride: int
    moved: Passes
    modules: frozenset[str] = frozenset()
    choices: int = 0
    is_behind_attention: bool = False
    collectives: int = 1
    halves: int = 1


@dataclass(frozen=True)
class Part:
    """An attention, an MLP or what is in their place: a symbol of a pattern."""

    operations: tuple[Operation, ...]
    exchanges: tuple[Exchange, ...] = ()

    def with_whole_backward(self) -> Part:
        return replace(self, operations=tuple(replace(o, is_whole=True) for o in self.operations))


def linear(
    name: str,
    tokens: float,
    inner: float,
    outer: float,
    execution: Execution,
    *,
    modules: Iterable[str] = (),
    engine: Engine = Engine.LINEAR,
    weights: float = 1,
    is_column: bool = False,
    is_row: bool = False,
    is_whole: bool = False,
) -> list[Operation]:
    """The product of ``tokens`` rows with a matrix, and the casts for it.

    Args:
        inner, outer: widths of what enters and of what leaves it on this rank.
        weights: matrices that share the rows: experts.
        is_column: whether it is the first product of a pair that tensor-parallel ranks divide.
    """
    entering, leaving, matrix = tokens * inner, tokens * outer, weights * inner * outer
    size = execution.element_bytes
    is_cast = engine in (Engine.LINEAR, Engine.GROUPED) and execution.precision.is_quantized
    operand = _QUANTIZED_BYTES[execution.precision] if is_cast else size
    flops = 2 * tokens * inner * outer
    product = Operation(
        name,
        engine,
        flops=Passes(flops, flops, flops),
        moved=Passes(
            (entering + matrix) * operand + leaving * size,
            (leaving + matrix) * operand + entering * size,
            (entering + leaving) * operand + matrix * _GRADIENT_BYTES,
        ),
        modules=frozenset(modules),
        is_row=is_row,
        is_whole=is_whole,
        product=MatrixProduct(tokens, inner, outer, weights),
        operand_bytes=operand,
    )
    if not is_cast:
        return [product]
    cast = size + 2 * operand  # read, and written for two products: one takes it transposed
    # What ranks with a share of the sequence gather is cast before: the input of the first product
    # of a pair, and the gradient of the last one's output (Transformer Engine's
    # module/layernorm_linear.py, and grad_output_preprocess in module/base.py).
    share = execution.split_tokens / execution.tokens
    entering *= share if is_column else 1.0
    leaving *= share if is_row else 1.0
    return [product, elementwise(f"{name}'s casts", entering, cast, leaving * cast, modules)]


def elementwise(
    name: str,
    elements: float,
    forward: float,
    backward_bytes: float,
    modules: Iterable[str] = (),
    *,
    flops: float = 0.0,
) -> Operation:
    """An operation that is all memory.

    Args:
        forward: bytes of each of ``elements`` that F reads and writes.
        backward_bytes: what I does, of all.
        flops: of F, for those who count them; they take no time beside the memory.
    """
    return Operation(
        name,
        Engine.MEMORY,
        flops=Passes(flops, 2 * flops),
        moved=Passes(elements * forward, backward_bytes),
        modules=frozenset(modules),
    )


def passing_over(
    name: str,
    elements: float,
    times: tuple[float, float],
    execution: Execution,
    modules: Iterable[str] = (),
    *,
    flops: float = 0.0,
) -> Operation:
    """An elementwise operation which reads or writes ``elements`` so many ``times`` in F and I."""
    forward, backward = (count * execution.element_bytes for count in times)
    return elementwise(name, elements, forward, elements * backward, modules, flops=flops)


def core(
    name: str,
    flops: float,
    moved: tuple[float, float],
    *,
    again: float = 0.0,
    modules: Iterable[str] = (),
    squared: float = 0.0,
) -> Operation:
    """What tokens do with one another, without weights: forward once, and twice for I."""
    return Operation(
        name,
        Engine.ATTENTION,
        flops=Passes(flops, 2 * flops),
        moved=Passes(*moved),
        again=again,
        modules=frozenset(modules),
        squared=squared,
    )


def beside(hidden: int, execution: Execution, *, is_alone: bool = False) -> list[Operation]:
    """The norm before a part, and the sum with what goes round it.

    ``is_alone``: whether Transformer Engine, too, has that norm outside the matrix behind it.
    """
    elements = execution.split_tokens * hidden
    again = ["layernorm"] if is_alone or not execution.transformer_engine else []
    return [
        passing_over("norm", elements, (2, 3), execution, again),
        passing_over("residual", elements, (3, 3), execution),
    ]


def divided(
    operations: list[Operation],
    exchanged: float,
    execution: Execution,
    exchanges: Iterable[Exchange] = (),
    modules: Iterable[str] = (),
) -> Part:
    """A part whose matrices tensor-parallel ranks divide.

    The first ones are divided by columns, and share their input; the last one is by rows, and its
    output is summed. In Userbuffers some keep whole backwards, and nobody waits.

    Args:
        exchanged: widths that the ranks wait for one another for in F, and again in I.
        exchanges: what there is besides.
    """
    ranks = execution.tensor_parallel
    if ranks == 1 or not exchanged:
        return Part(tuple(operations), tuple(exchanges))
    if execution.userbuffers:
        whole = {Engine.LINEAR}
        columns = "column" in execution.userbuffers
        kept = [
            replace(o, is_whole=o.is_whole or (o.engine in whole and (columns or o.is_row)))
            for o in operations
        ]
        return Part(tuple(kept), tuple(exchanges))
    moved = execution.tokens * exchanged * execution.element_bytes
    collectives = 2 if execution.sequence_parallel else 1
    waits = Exchange(
        Group.TENSOR,
        ranks,
        1,
        Passes(moved, moved),
        frozenset(modules),
        collectives=collectives,
        halves=2,
    )
    return Part(tuple(operations), (waits, *exchanges))
