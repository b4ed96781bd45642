"""Part of a tensor on a rank, named as in Megatron's format torch_dist.

The same tensor lies on other ranks, in other parts, under another schedule. Parts are compared by
their place in the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

# numpy types that store the bits of torch's types, as numpy has no bfloat16 and no 8-bit floats.
STORED_AS: Mapping[str, str] = {
    "float64": "i8",
    "float32": "i4",
    "float16": "i2",
    "bfloat16": "i2",
    "float8_e4m3fn": "i1",
    "float8_e5m2": "i1",
    "int64": "i8",
    "int32": "i4",
    "int16": "i2",
    "int8": "i1",
    "uint8": "i1",
    "bool": "i1",
}

STATES = "optimizer.state."  # prefix of names of optimizer states

# Offset, shape, start and stop of a piece of a tensor.
Place = tuple[tuple[int, ...], tuple[int, ...], int, int]


@dataclass(frozen=True)
class Piece:
    """Part of a tensor that a rank has.

    Attributes:
        name: name of the tensor in torch_dist, where equal layers share one name.
        index: number of the layer, or of the layer and the expert, if several share the name.
        global_shape: shape of the whole tensor.
        offset, shape: offset of the rank's shard in the whole tensor, and shape of the shard.
        start, stop: range of the elements of the flattened shard that the rank has. A distributed
            optimizer splits the shard over data-parallel ranks.
        dtype: torch's name of the type.
        is_copy: whether torch_dist saves the copy of another rank.
    """

    name: str
    index: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: str
    is_copy: bool = False

    @property
    def place(self) -> Place:
        """Place of the piece in its tensor; copies have the same place."""
        return self.offset, self.shape, self.start, self.stop

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.numel * np.dtype(STORED_AS[self.dtype]).itemsize

    @property
    def is_whole_shard(self) -> bool:
        return self.numel == math.prod(self.shape)

    def as_data(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]

    @classmethod
    def from_data(cls, data: list[Any]) -> Piece:
        name, index, global_shape, offset, shape, *rest = data
        return cls(name, tuple(index), tuple(global_shape), tuple(offset), tuple(shape), *rest)
