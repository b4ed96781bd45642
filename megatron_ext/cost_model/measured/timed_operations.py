"""Operations that are timed for `MachineFactors`, and the seconds that are estimated of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.measured.machine_factors import Shape, TimedGather, TimedProduct
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.operations.operation import (
    Engine,
    Exchange,
    Group,
    Passes,
    linear,
)
from megatron_ext.cost_model.operations.parts import part_of
from megatron_ext.cost_model.rates import Rates

TENSOR_PARALLEL = (1, 2, 4, 8)  # sizes whose products are timed
# Bytes of a gather, those of all ranks together: 256 KiB to 64 MiB.
GATHERED = tuple(4**power * 2**18 for power in range(5))


def timed_products(
    model: Model, execution: Execution, rates: Rates, seconds_of: Callable[[Shape], float | None]
) -> tuple[TimedProduct, ...]:
    """Return the products of F, I and W of the layers of ``model``, at each of `TENSOR_PARALLEL`.

    Each is timed as a product alone, which writes 16 bits an element.

    Args:
        rates: for the estimate; without factors.
        seconds_of: measures a product of (rows, columns, depth); None if it cannot. Such products
            are not returned.
    """
    shapes: dict[Shape, None] = {}
    for ranks in TENSOR_PARALLEL:
        run = replace(execution, tensor_parallel=ranks)
        for symbol in dict.fromkeys("".join(model.layers)):
            for operation in part_of(symbol, model, run).operations:
                if operation.product is not None and operation.engine is Engine.LINEAR:
                    shapes |= dict.fromkeys(operation.product.shapes)
    # A size that does not divide a matrix leaves a part of an element.
    whole = [shape for shape in shapes if all(float(size).is_integer() for size in shape)]
    measured = {shape: seconds_of(shape) for shape in whole}
    return tuple(
        TimedProduct(shape, seconds, _estimated(shape, execution, rates))
        for shape, seconds in measured.items()
        if seconds is not None
    )


def _estimated(shape: Shape, execution: Execution, rates: Rates) -> float:
    rows, columns, depth = shape
    product, *_ = linear("product", rows, depth, columns, execution)
    forward, _, _ = rates.seconds_of(product)
    return forward


def timed_gathers(
    ranks: int, rates: Rates, seconds: Mapping[float, float]
) -> tuple[TimedGather, ...]:
    """Return gathers among ``ranks`` tensor-parallel ranks, whose ``seconds`` were measured by
    their bytes. ``rates``: without factors."""
    timed = []
    for size, measured in seconds.items():
        gather = Exchange(Group.TENSOR, ranks, 1, Passes(size, 0.0))
        estimated, _ = rates.seconds_to_exchange(gather)
        timed.append(TimedGather(size, ranks, measured, estimated))
    return tuple(timed)
