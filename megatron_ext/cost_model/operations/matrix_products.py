"""Seconds of a matrix product by its shape: tiles of the output, in waves over a GPU's SMs.

A GPU computes the output of a product in tiles, one on each SM at a time. A tile that reaches
beyond the matrix costs as much as a whole one, and a last wave with few tiles as much as a full
one (NVIDIA 2023, Matrix Multiplication Background User's Guide, sections 2.3, 3.1 and 3.2):

    seconds = waves * (max(multiply, load operands) + write the tile)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Rows and columns of cuBLAS' output tiles, the most efficient tile first (section 2.3 of NVIDIA's
# guide).
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))


@dataclass(frozen=True)
class MatrixProduct:
    """Product of ``rows`` tokens with a matrix in the forward pass, or ``groups`` of such products.

    Each group (expert) has a matrix of its own and an equal share of the rows.

    Attributes:
        inner, outer: widths of the input and of the output.
    """

    rows: float
    inner: float
    outer: float
    groups: float = 1

    @property
    def shapes(self) -> tuple[tuple[float, float, float], ...]:
        """Rows, columns and depth of the matrix products of F, I and W, for one group of
        experts."""
        rows = self.rows / self.groups
        return (
            (rows, self.outer, self.inner),
            (rows, self.inner, self.outer),
            (self.outer, self.inner, rows),
        )


@dataclass(frozen=True)
class TensorCores:
    """Rates that all SMs of a GPU reach together while they compute tiles of a matrix product.

    Attributes:
        flops: floating-point operations per second.
        operands: bytes of operands per second from the second-level cache.
        outputs: bytes of outputs per second to the memory.
        sms: streaming multiprocessors.
    """

    flops: float
    operands: float
    outputs: float
    sms: int

    def seconds(
        self,
        shape: tuple[float, float, float],
        groups: float,
        operand_bytes: float,
        output_bytes: float,
    ) -> float:
        """Return the seconds of ``groups`` matrix products of one shape, with the quickest tile.

        Args:
            shape: rows, columns and depth of each product.
            operand_bytes: bytes of an element that is multiplied.
            output_bytes: bytes of an element of the output, including bytes that are read.
        """
        rows, columns, depth = shape
        return min(
            math.ceil(math.ceil(rows / height) * math.ceil(columns / width) * groups / self.sms)
            * self.sms
            * (
                depth
                * max(
                    2 * height * width / self.flops,
                    (height + width) * operand_bytes / self.operands,
                )
                + height * width * output_bytes / self.outputs
            )
            for height, width in TILES
        )
