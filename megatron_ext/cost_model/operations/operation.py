"""Operations of a GPU, and exchanges with other GPUs, for a microbatch in a part of a layer.

An operation has a number of floating-point operations, counted as in Megatron's papers (Narayanan
et al. 2021, appendix), and of bytes that it reads and writes in the GPU's memory. A product of
matrices costs the same in F, in I and in W. An operation without weights has no W.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from megatron_ext.cost_model.execution import Execution, Precision
from megatron_ext.cost_model.operations.matrix_products import MatrixProduct

_QUANTIZED_BYTES = {  # bytes of an element in low precision, with its scales
    Precision.FP8: 1.0,
    Precision.MXFP8: 1.0,
    Precision.FP4: 0.5,
}
# Bytes that are moved for an element of a weight's fp32 gradient: one read and one write.
_GRADIENT_BYTES = 8


class Engine(StrEnum):
    """Resource of a GPU that an operation keeps busy; each has its own rate."""

    LINEAR = "layers' matrices"  # matrices of layers, multiplied in the run's precision
    MATRIX = "other matrices"  # the router and the output layer, multiplied in 16 bits
    GROUPED = "experts' matrices"
    ATTENTION = "attention"  # attention and the recurrences that replace it
    MEMORY = "memory"  # operations that move memory, element by element


@dataclass(frozen=True)
class Passes:
    """Floating-point operations or bytes of an operation in each of F, I and W."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0


@dataclass(frozen=True)
class Operation:
    """One operation (such as a matrix product) on all tokens of a microbatch, on one rank.

    Attributes:
        flops: floating-point operations, without those that are recomputed.
        moved: bytes to and from the GPU's memory.
        recomputed_flops: floating-point operations of F that its own backward pass recomputes.
        modules: names of ``--recompute-modules`` that make I recompute it.
        is_unsplit: whether its backward pass cannot be split; W then runs with I.
        is_row: whether it is the row-parallel product of a tensor-parallel pair.
        squared: the share of its F and I that grows with the square of the sequence.
        product: the shape of a matrix product; None for other operations.
        operand_bytes: bytes of an element that a matrix product multiplies.
        drawn: random numbers that F draws.
    """

    name: str
    engine: Engine
    flops: Passes = field(default_factory=Passes)
    moved: Passes = field(default_factory=Passes)
    recomputed_flops: float = 0.0
    modules: frozenset[str] = frozenset()
    is_unsplit: bool = False
    is_row: bool = False
    squared: float = 0.0
    product: MatrixProduct | None = None
    operand_bytes: float = 2.0
    drawn: float = 0.0

    @property
    def is_attention(self) -> bool:
        """Whether this operation is attention itself, not a recurrence that replaces attention."""
        return self.engine is Engine.ATTENTION and self.name == "attention"


class Group(StrEnum):
    """Kind of process group whose ranks wait for one another within a pass."""

    TENSOR = "tensor-parallel"
    EXPERT = "expert-parallel"
    CONTEXT = "context-parallel"


@dataclass(frozen=True)
class Exchange:
    """Communication of a rank with a process group during a pass, which the pass waits for.

    Attributes:
        ranks, stride: size of the group, and the distance from one of its ranks to the next.
        moved: bytes in F and in I, including the share that stays on the rank itself.
        choices: number of ranks that each token goes to: once to each rank, and once over the
            network to each other node. 0: ``moved`` is split evenly over all ranks.
        groups: the largest number of groups of ranks that a token's ``choices`` may be in, and the
            number of all groups; (0, 0): choices may be in any group.
        modules: names of ``--recompute-modules`` that make I repeat it.
        is_behind_attention: whether the exchange overlaps attention.
        collectives: number of collectives in F, and the same number in I.
        ring_passes: passes around the ring in F, and the same number in I: one for a gather or a
            reduce-scatter, two for an all-reduce.
    """

    group: Group
    ranks: int
    stride: int
    moved: Passes
    modules: frozenset[str] = frozenset()
    choices: int = 0
    groups: tuple[int, int] = (0, 0)
    is_behind_attention: bool = False
    collectives: int = 1
    ring_passes: int = 1


@dataclass(frozen=True)
class Part:
    """Operations and exchanges of a part of a layer, such as attention or an MLP.

    A part is one symbol of a hybrid layer pattern.
    """

    operations: tuple[Operation, ...]
    exchanges: tuple[Exchange, ...] = ()

    def with_whole_backward(self) -> Part:
        return replace(self, operations=tuple(replace(o, is_unsplit=True) for o in self.operations))


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
    is_unsplit: bool = False,
) -> list[Operation]:
    """Return the product of ``tokens`` rows with a matrix, and the casts to lower precision for it.

    Args:
        inner, outer: widths of its input and of its output on this rank.
        weights: number of matrices that share the rows: experts.
        is_column: whether it is the first product of a pair that tensor-parallel ranks partition.
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
        is_unsplit=is_unsplit,
        product=MatrixProduct(tokens, inner, outer, weights),
        operand_bytes=operand,
    )
    if not is_cast:
        return [product]
    # A cast to low precision reads an operand once and writes it twice, since one of the two
    # products takes it transposed.
    cast = size + 2 * operand
    # With sequence parallelism a tensor is cast before it is gathered: the input of the first of
    # two products, and the output gradient of the second one (Transformer Engine's
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
    """Return an elementwise operation, which only moves memory.

    Args:
        forward: bytes that F reads and writes for each of ``elements``.
        backward_bytes: bytes that I reads and writes, for all elements together.
        flops: floating-point operations of F. They are counted, but take no time in addition to
            moving memory.
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
    """Return an elementwise operation that reads or writes all ``elements`` several times.

    ``times`` are the numbers of reads and writes in F and in I.
    """
    forward, backward = (count * execution.element_bytes for count in times)
    return elementwise(name, elements, forward, elements * backward, modules, flops=flops)


def dropout(
    name: str, elements: float, execution: Execution, modules: Iterable[str] = ()
) -> Operation:
    """Return a dropout as a separate kernel, which draws a random number for each of ``elements``.

    It writes and reads a mask of one byte each.
    """
    moved = (2 * execution.element_bytes + 1) * elements
    return Operation(
        name,
        Engine.MEMORY,
        moved=Passes(moved, moved),
        modules=frozenset(modules),
        drawn=elements,
    )


def attention_operation(
    name: str,
    flops: float,
    moved: tuple[float, float],
    *,
    recomputed_flops: float = 0.0,
    modules: Iterable[str] = (),
    squared: float = 0.0,
) -> Operation:
    """Return an operation in which tokens interact: attention, or a recurrence.

    It has no weights, and I costs twice as much as F.
    """
    return Operation(
        name,
        Engine.ATTENTION,
        flops=Passes(flops, 2 * flops),
        moved=Passes(*moved),
        recomputed_flops=recomputed_flops,
        modules=frozenset(modules),
        squared=squared,
    )


def norm_and_residual(
    hidden_size: int, execution: Execution, *, is_alone: bool = False
) -> list[Operation]:
    """Return the norm before attention or an MLP, and the addition of the residual after it.

    Args:
        is_alone: whether the norm is a separate module in Transformer Engine too, rather than fused
            into the matrix product after it.
    """
    elements = execution.split_tokens * hidden_size
    modules = ["layernorm"] if is_alone or not execution.transformer_engine else []
    is_local = execution.has_local_kernels
    # A local norm reads its input and its gradient once more for its own weights' gradient
    # (HostLayerNormGradient in apex's csrc/layer_norm_cuda_kernel.cu).
    operations = [
        passing_over("norm", elements, (2, 5 if is_local else 3), execution, modules),
        passing_over("residual", elements, (3, 3), execution),
    ]
    if is_local and execution.hidden_dropout:
        operations.append(dropout("dropout", elements, execution))
    return operations


def local_bias(name: str, elements: float, execution: Execution, *, is_added: bool) -> Operation:
    """Return the operation of a bias behind a matrix of Megatron's local layers.

    I sums its gradient; F adds it unless the next kernel does (core/tensor_parallel/layers.py).
    """
    return passing_over(name, elements, (2 * is_added, 1), execution)


def tensor_parallel_part(
    operations: list[Operation],
    exchanged: float,
    execution: Execution,
    exchanges: Iterable[Exchange] = (),
    modules: Iterable[str] = (),
    *,
    more_sums: int = 0,
) -> Part:
    """Return a part of a layer whose matrices are partitioned over tensor-parallel ranks.

    The first matrices are partitioned by columns and share their input. The last one is partitioned
    by rows, and its outputs are summed. With Userbuffers some matrices keep an unsplit backward
    pass, and no rank waits.

    Args:
        exchanged: summed widths of the tensors that ranks wait for in F, and the same in I.
        exchanges: further exchanges of the part.
        more_sums: further all-reduces of the input's gradient that ranks wait for in I.
    """
    ranks = execution.tensor_parallel
    if ranks == 1 or not exchanged:
        return Part(tuple(operations), tuple(exchanges))
    if execution.userbuffers:
        unsplit = {Engine.LINEAR}
        columns = "column" in execution.userbuffers
        kept = [
            replace(o, is_unsplit=o.is_unsplit or (o.engine in unsplit and (columns or o.is_row)))
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
        ring_passes=2,
    )
    more = replace(waits, moved=Passes(input_gradient=moved), collectives=1)
    return Part(tuple(operations), (waits, *[more] * more_sums, *exchanges))
