"""Factors of a machine: measured over estimated seconds of single operations, by their shapes.

Costs per layer type are valid for the sizes at which they were measured. At other tensor-parallel
sizes a layer has other products, fewer heads and shorter collectives, whose seconds change by more
or less than the estimate says. Each operation's estimate is multiplied by the factor of the
measured operation that is closest in shape or size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ext.base.words import shown

FORMAT = 2

ProductShape = tuple[float, float, float]  # rows, columns and depth of a matrix product
# Shape of the experts' grouped product: rows, columns and depth of each single product, and the
# number of experts.
GroupedShape = tuple[float, float, float, float]


@dataclass(frozen=True)
class TimedKernel:
    """Measured and estimated seconds of one kernel of a certain shape."""

    shape: tuple[float, ...]
    measured: float
    estimated: float


@dataclass(frozen=True)
class TimedCollective:
    """Measured and estimated seconds of one collective of a certain size.

    Attributes:
        size: bytes of the whole buffer, with the shares of all ranks.
        ranks: how many ranks take part.
    """

    size: float
    ranks: int
    measured: float
    estimated: float


@dataclass(frozen=True)
class MachineFactors:
    """Timed operations of one machine, from which factors on estimates of other shapes follow.

    Attributes:
        gpu: name that the GPU's driver gives.
        versions: versions of torch, CUDA and so on, in words.
        precision: precision of the products, by its name in `Precision`.
        products: matrix products in the layers' precision, with their `ProductShape`.
        gathers: gathers of tensor-parallel ranks.
        grouped: experts' products, with their `GroupedShape`.
        attention, attention_backward: attention, with floating-point operations and bytes of the
            forward pass as its shape.
        exchanges: exchanges of expert-parallel ranks, all to all.
    """

    gpu: str
    versions: tuple[str, ...]
    precision: str
    products: tuple[TimedKernel, ...] = ()
    gathers: tuple[TimedCollective, ...] = ()
    grouped: tuple[TimedKernel, ...] = ()
    attention: tuple[TimedKernel, ...] = ()
    attention_backward: tuple[TimedKernel, ...] = ()
    exchanges: tuple[TimedCollective, ...] = ()

    def of_product(self, shape: ProductShape) -> float:
        """Return measured over estimated seconds of the timed product closest in shape."""
        return _of_closest(self.products, shape)

    def of_grouped(self, shape: GroupedShape) -> float:
        """Return measured over estimated seconds of the timed experts' products closest in
        shape."""
        return _of_closest(self.grouped, shape)

    def of_attention(self, flops: float, moved: float) -> tuple[float, float]:
        """Return measured over estimated seconds of attention, forward and backward.

        The ratios are those of the timed attention closest in floating-point operations and bytes
        of the forward pass.
        """
        shape = flops, moved
        return _of_closest(self.attention, shape), _of_closest(self.attention_backward, shape)

    def of_gather(self, size: float) -> float:
        """Return measured over estimated seconds of a gather of ``size`` bytes.

        The factor is interpolated between the timed sizes, by the logarithm of the size; outside
        these sizes it is that of the nearest one.
        """
        return _of_size(self.gathers, size)

    def of_exchange(self, size: float) -> float:
        """Return measured over estimated seconds of an exchange of ``size`` bytes between experts.

        The exchange is among expert-parallel ranks; the factor is found as in `of_gather`.
        """
        return _of_size(self.exchanges, size)

    def is_of(self, gpu: str) -> bool:
        """Return whether these are measurements of the GPU ``gpu``, a short name or its
        driver's."""
        return gpu.lower() in (self.gpu.lower(), *self.gpu.lower().replace("-", " ").split())

    def as_data(self) -> dict[str, Any]:
        """Return these timed operations as an entry of a costs file, for `read_factors`."""
        return {
            "version": FORMAT,
            "gpu": self.gpu,
            "versions": list(self.versions),
            "precision": self.precision,
            **{
                name: [[*k.shape, k.measured, k.estimated] for k in getattr(self, name)]
                for name in _KERNELS
            },
            **{
                name: [[c.size, c.ranks, c.measured, c.estimated] for c in getattr(self, name)]
                for name in _COLLECTIVES
            },
        }

    def remark(self) -> str:
        """Return a remark for users on the timed operations: how far estimates were off, and what
        follows."""
        names = {
            "products": f"products in {self.precision}",
            "grouped": "experts' products",
            "attention": "attentions",
            "gathers": "gathers of tensor-parallel ranks",
            "exchanges": "exchanges of expert-parallel ranks",
        }
        found = {name: getattr(self, name) for name in names}
        medians = [
            f"{statistics.median(map(_factor, timed)):.2f} for {len(timed)} {names[name]}"
            for name, timed in found.items()
            if timed
        ]
        missing = [names[name] for name, timed in found.items() if not timed]
        return (
            f"single operations were timed on a machine with {self.gpu} "
            f"({', '.join(self.versions)}). The medians of measured divided by estimated seconds "
            f"are {', '.join(medians)}. The estimate of an operation is multiplied by the factor "
            f"of the timed operations closest in shape or size. No factor was measured for "
            f"{', '.join([*missing, 'other messages'])}: their estimates follow the measured "
            f"layers alone"
        )


# Timed kernels of a costs file, with the number of dimensions of their shapes.
_KERNELS = {"products": 3, "grouped": 4, "attention": 2, "attention_backward": 2}
_COLLECTIVES = "gathers", "exchanges"


def _factor(timed: TimedKernel | TimedCollective) -> float:
    return timed.measured / timed.estimated


def _of_closest(timed: Sequence[TimedKernel], shape: tuple[float, ...]) -> float:
    """Return measured over estimated seconds of the kernel closest in shape; 1 if there is none.

    The distance is by the logarithm of each dimension.
    """
    if not timed or not all(shape):
        return 1.0

    def distance(kernel: TimedKernel) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(kernel.shape, shape, strict=True))

    return _factor(min(timed, key=distance))


def _of_size(timed: Sequence[TimedCollective], size: float) -> float:
    if not timed or size <= 0:
        return 1.0
    by_size = sorted(timed, key=lambda collective: collective.size)
    sizes = [math.log(collective.size) for collective in by_size]
    return float(np.interp(math.log(size), sizes, list(map(_factor, by_size))))


def read_factors(data: Mapping[str, Any]) -> MachineFactors:
    """Return the timed operations of a machine in the entry ``data`` of a costs file.

    Raises:
        ValueError: another format, or a number that is not above 0.
        KeyError, TypeError: something is missing, or is something else.
    """
    if data["version"] != FORMAT:
        raise ValueError(
            f"the version of the machine's measured factors is {shown(data['version'])}, and only "
            f"{FORMAT} is known"
        )

    def figure(value: Any) -> float:
        if isinstance(value, bool) or not 0 < float(value) < 1e30:
            raise ValueError(f"{value!r} is not a number above 0")
        return float(value)

    def rows(name: str, values: int) -> Iterator[list[float]]:
        for row in data[name]:
            if len(row) != values:
                raise ValueError(f"{shown(row)} of {name} has {len(row)} values, not {values}")
            yield list(map(figure, row))

    def kernels(name: str) -> tuple[TimedKernel, ...]:
        return tuple(
            TimedKernel(tuple(shape), measured, estimated)
            for *shape, measured, estimated in rows(name, _KERNELS[name] + 2)
        )

    def collectives(name: str) -> tuple[TimedCollective, ...]:
        return tuple(
            TimedCollective(size, int(ranks), measured, estimated)
            for size, ranks, measured, estimated in rows(name, 4)
        )

    return MachineFactors(
        str(data["gpu"]),
        tuple(map(str, data["versions"])),
        str(data["precision"]),
        kernels("products"),
        collectives("gathers"),
        kernels("grouped"),
        kernels("attention"),
        kernels("attention_backward"),
        collectives("exchanges"),
    )
