"""Factors of a machine: measured over estimated seconds of single operations, by their shapes.

Costs per layer type hold for the sizes at which they were measured. At other tensor-parallel sizes
a layer has other products and shorter collectives, whose seconds change by more or less than the
estimate says. Each of them takes the factor of the measured one that is closest in shape.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ext.words import shown

FORMAT = 1

Shape = tuple[float, float, float]  # rows, columns, depth


@dataclass(frozen=True)
class TimedProduct:
    """Seconds of one matrix product in the layers' precision, measured and estimated."""

    shape: Shape
    measured: float
    estimated: float


@dataclass(frozen=True)
class TimedGather:
    """Seconds of one gather among tensor-parallel ranks, measured and estimated.

    Attributes:
        size: bytes of all ranks' shares together.
        ranks: how many ranks gather.
    """

    size: float
    ranks: int
    measured: float
    estimated: float


@dataclass(frozen=True)
class MachineFactors:
    """Measurements of one machine, from which factors of other shapes follow.

    Attributes:
        gpu: name that the GPU's driver gives.
        versions: of torch, CUDA and so on, in words.
        precision: of the products, by its name in `Precision`.
    """

    gpu: str
    versions: tuple[str, ...]
    precision: str
    products: tuple[TimedProduct, ...] = ()
    gathers: tuple[TimedGather, ...] = ()

    def of_product(self, shape: Shape) -> float:
        """Return the factor of the measured product that is closest in shape to ``shape``."""
        if not self.products:
            return 1.0

        def distance(product: TimedProduct) -> float:
            return sum(abs(math.log(a / b)) for a, b in zip(product.shape, shape, strict=True))

        closest = min(self.products, key=distance)
        return closest.measured / closest.estimated

    def of_gather(self, size: float) -> float:
        """Return the factor of a gather of ``size`` bytes: between those of the measured sizes on
        both sides, by the logarithm of the size; beyond all of them that of the last one."""
        if not self.gathers or size <= 0:
            return 1.0
        gathers = sorted(self.gathers, key=lambda gather: gather.size)
        sizes = [math.log(gather.size) for gather in gathers]
        factors = [gather.measured / gather.estimated for gather in gathers]
        return float(np.interp(math.log(size), sizes, factors))

    def is_of(self, gpu: str) -> bool:
        """Return whether this is a machine of ``gpu``, named in short (h100) or by its driver."""
        return gpu.lower() in (self.gpu.lower(), *self.gpu.lower().replace("-", " ").split())

    def as_data(self) -> dict[str, Any]:
        """Return the entry of a costs file, for `read_factors`."""
        return {
            "version": FORMAT,
            "gpu": self.gpu,
            "versions": list(self.versions),
            "precision": self.precision,
            "products": [[*p.shape, p.measured, p.estimated] for p in self.products],
            "gathers": [[g.size, g.ranks, g.measured, g.estimated] for g in self.gathers],
        }

    def remark(self) -> str:
        """Return one line on what was measured."""
        of_products = _middle(p.measured / p.estimated for p in self.products)
        of_gathers = _middle(g.measured / g.estimated for g in self.gathers)
        what = [
            f"{len(self.products)} products in {self.precision}{of_products}",
            f"{len(self.gathers)} gathers of tensor-parallel ranks{of_gathers}"
            if self.gathers
            else "no gather, as it had no tensor-parallel ranks",
        ]
        return (
            f"operations are scaled to those of a machine with {self.gpu} "
            f"({', '.join(self.versions)}): {' and '.join(what)}; experts' products, attention and "
            f"other messages are as estimated, but for what layers took"
        )


def _middle(factors: Iterable[float]) -> str:
    known = list(factors)
    return f", {statistics.median(known):.2f} of the estimate in the middle" if known else ""


def read_factors(data: Mapping[str, Any]) -> MachineFactors:
    """Return the factors in the entry ``data`` of a costs file.

    Raises:
        ValueError: another format, or a figure that is not above 0.
        KeyError, TypeError: something is missing, or is something else.
    """
    if data["version"] != FORMAT:
        raise ValueError(f"its version is {shown(data['version'])}, and only {FORMAT} is known")

    def figure(value: Any) -> float:
        if isinstance(value, bool) or not 0 < float(value) < 1e30:
            raise ValueError(f"{value!r} is no figure above 0")
        return float(value)

    products = []
    for row in data["products"]:
        rows, columns, depth, measured, estimated = map(figure, row)
        products.append(TimedProduct((rows, columns, depth), measured, estimated))
    gathers = []
    for row in data["gathers"]:
        size, ranks, measured, estimated = map(figure, row)
        gathers.append(TimedGather(size, int(ranks), measured, estimated))
    return MachineFactors(
        str(data["gpu"]),
        tuple(map(str, data["versions"])),
        str(data["precision"]),
        tuple(products),
        tuple(gathers),
    )
