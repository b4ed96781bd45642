"""Operations that are timed for `MachineFactors`, and their estimated seconds.

Factors help for sizes that are not measured only if the timed shapes cover them. So products,
attention and collectives are chosen at several tensor-parallel sizes of the trained model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.measured.machine_factors import (
    GroupedShape,
    ProductShape,
    TimedCollective,
    TimedKernel,
)
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.operations.operation import (
    Engine,
    Exchange,
    Group,
    Operation,
    Passes,
    linear,
)
from megatron_ext.cost_model.operations.parts import part_of
from megatron_ext.cost_model.rates import Rates

TENSOR_PARALLEL = (1, 2, 4, 8)  # sizes of tensor parallelism whose kernels are timed
# Bytes of a timed collective, summed over its ranks: 256 KiB to 64 MiB.
GATHERED = tuple(4**power * 2**18 for power in range(5))
# Shape of a timed attention: samples, tokens of a sample, heads, query groups, and the width of a
# head.
AttentionShape = tuple[int, int, int, int, int]


def timed_products(
    model: Model,
    execution: Execution,
    rates: Rates,
    seconds_of: Callable[[ProductShape], float | None],
) -> tuple[TimedKernel, ...]:
    """Time the matrix products of a model's layers at several tensor-parallel sizes, and return
    them.

    The products are those of F, I and W. Each is timed alone, and writes 16 bits an element.

    Args:
        rates: rates for the estimate, without factors.
        seconds_of: function that measures a product of (rows, columns, depth); None if it cannot.
            Such products are not returned.
    """
    runs = [replace(execution, tensor_parallel=ranks) for ranks in TENSOR_PARALLEL]
    shapes: dict[ProductShape, None] = {}
    for operation in _operations(model, runs, Engine.LINEAR):
        if operation.product is not None:
            shapes |= dict.fromkeys(operation.product.shapes)
    measured = {shape: seconds_of(shape) for shape in shapes if _is_integral(shape)}
    return tuple(
        TimedKernel(shape, seconds, _estimated((*shape, 1.0), execution, rates, Engine.LINEAR))
        for shape, seconds in measured.items()
        if seconds is not None
    )


def timed_grouped(
    model: Model,
    execution: Execution,
    rates: Rates,
    seconds_of: Callable[[GroupedShape], float | None],
) -> tuple[TimedKernel, ...]:
    """Time the products of experts in F, I and W at several expert-parallel sizes, and return them.

    The sizes are half as many expert-parallel ranks as ``execution`` has, as many, and twice as
    many. Arguments are those of `timed_products`.
    """
    ranks = execution.expert_parallel
    sizes = [
        size for size in (ranks // 2, ranks, 2 * ranks) if size and not model.num_experts % size
    ]
    runs = [replace(execution, expert_parallel=size) for size in sizes]
    shapes: dict[GroupedShape, None] = {}
    for operation in _operations(model, runs, Engine.GROUPED):
        product = operation.product
        if product is not None:
            shapes |= dict.fromkeys((*shape, product.groups) for shape in product.shapes)
    measured = {shape: seconds_of(shape) for shape in shapes if _is_integral(shape)}
    return tuple(
        TimedKernel(shape, seconds, _estimated(shape, execution, rates, Engine.GROUPED))
        for shape, seconds in measured.items()
        if seconds is not None
    )


def _operations(model: Model, runs: Iterable[Execution], engine: Engine) -> Iterator[Operation]:
    """Yield the operations of all layer types that use ``engine``, for each execution in
    ``runs``."""
    for run in runs:
        for symbol in dict.fromkeys("".join(model.layers)):
            for operation in part_of(symbol, model, run).operations:
                if operation.engine is engine:
                    yield operation


def _is_integral(shape: tuple[float, ...]) -> bool:
    """Return whether all dimensions of ``shape`` are whole numbers after the split over ranks."""
    return all(float(size).is_integer() for size in shape)


def _estimated(shape: GroupedShape, execution: Execution, rates: Rates, engine: Engine) -> float:
    rows, columns, depth, groups = shape
    product, *_ = linear(
        "product", rows * groups, depth, columns, execution, engine=engine, weights=groups
    )
    forward, _, _ = rates.seconds_of(product)
    return forward


def timed_attention(
    model: Model,
    execution: Execution,
    rates: Rates,
    seconds_of: Callable[[AttentionShape], tuple[float, float] | None],
) -> tuple[tuple[TimedKernel, ...], tuple[TimedKernel, ...]]:
    """Time fused causal attention, forward and backward, at several tensor-parallel sizes.

    Nothing is returned for latent attention, for windows and for context-parallel ranks.

    Args:
        rates: rates for the estimate, without factors.
        seconds_of: function that measures the two passes; None if it cannot.
    """
    forward: list[TimedKernel] = []
    backward: list[TimedKernel] = []
    is_timed = (
        "*" in "".join(model.layers)
        and model.is_causal
        and execution.transformer_engine
        and execution.context_parallel == 1
        and not model.multi_latent_attention
    )
    for ranks in TENSOR_PARALLEL if is_timed else ():
        heads, groups = model.num_attention_heads, model.num_query_groups
        if heads % ranks or groups % ranks:
            continue
        of_rank = heads // ranks, groups // ranks, model.kv_channels
        measured = seconds_of((execution.micro_batch, execution.sequence, *of_rank))
        run = replace(execution, tensor_parallel=ranks)
        operation = next(o for o in part_of("*", model, run).operations if o.is_attention)
        estimated = rates.seconds_of(operation)
        shape = operation.flops.forward, operation.moved.forward
        if measured is not None:
            forward.append(TimedKernel(shape, measured[0], estimated[0]))
            backward.append(TimedKernel(shape, measured[1], estimated[1]))
    return tuple(forward), tuple(backward)


def timed_collectives(
    group: Group, ranks: int, stride: int, rates: Rates, seconds: Mapping[float, float]
) -> tuple[TimedCollective, ...]:
    """Return measured and estimated seconds of collectives among ``ranks`` ranks of a group.

    Args:
        stride: the distance from one of these ranks to the next.
        rates: rates for the estimate, without factors.
        seconds: measured seconds by bytes.
    """
    timed = []
    for size, measured in seconds.items():
        collective = Exchange(group, ranks, stride, Passes(size, 0.0))
        estimated, _ = rates.seconds_to_exchange(collective)
        timed.append(TimedCollective(size, ranks, measured, estimated))
    return tuple(timed)
