"""A part of a tensor that a rank holds, named as in Megatron's format torch_dist."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

# How the bits of torch's types lie in a file. numpy has no bfloat16 and no 8-bit floats.
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

Place = tuple[tuple[int, ...], tuple[int, ...], int, int]  # offset, shape, start, stop


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a tensor.

    Attributes:
        name: of the tensor in torch_dist. Layers that are alike have one name there.
        index: which layer, or layer and expert, where they have one name.
        whole: the shape of the whole tensor.
        offset, shape: where in it the rank's shard lies, and the shard's shape.
        start, stop: the elements of the flattened shard that are here. A distributed optimizer
            divides them over data-parallel ranks.
        dtype: torch's name of it.
        is_copy: another rank's is the one that torch_dist saves.
    """

    name: str
    index: tuple[int, ...]
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: str
    is_copy: bool = False

    @property
    def place(self) -> Place:
        """Where in the tensor it lies; copies have the same."""
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
        name, index, whole, offset, shape, *rest = data
        return cls(name, tuple(index), tuple(whole), tuple(offset), tuple(shape), *rest)
