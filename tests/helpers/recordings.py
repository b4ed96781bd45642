"""Recordings that are written without a training, to be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.recordings.piece import STORED_AS, Piece
from megatron_ext.recordings.writing import RankWriter

Tensors = dict[Piece, np.ndarray]


def piece(name: str, values: np.ndarray, index: tuple[int, ...] = ()) -> Piece:
    """Return the description of a tensor that is recorded as one piece."""
    shape = values.shape
    dtype = str(values.dtype)
    return Piece(name, index, shape, (0,) * len(shape), shape, 0, values.size, dtype)


def tensor(name: str, values: Sequence[float], index: tuple[int, ...] = ()) -> Tensors:
    """Return a tensor of ``values`` in fp32, with the description of its only piece as the key."""
    array = np.array(values, np.float32)
    return {piece(name, array, index): array}


@dataclass(frozen=True)
class Course:
    """Data that the ranks of a small training record. ``ranks`` has, for each rank, its tensors in
    an iteration."""

    losses: Sequence[float] = (3.0, 2.5, 2.0)
    norms: Sequence[float] = (1.5, 1.25, 1.125)
    ranks: Sequence[Tensors] = field(
        default_factory=lambda: (
            tensor("layers.weight", [1, 2, 3, 4], (0,)) | tensor("optimizer.state.m.w", [7, 8]),
            tensor("layers.weight", [5, 6, 7, 8], (1,)),
        )
    )
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"num_layers": 2, "clip_grad": 0})
    # By rank: tensors that replace those of `ranks` from iteration ``changed_from`` on.
    changed: Mapping[int, Tensors] = field(default_factory=dict)
    changed_from: int = 3

    def but(self, **others: Any) -> Course:
        return replace(self, **others)


def write(folder: Path, course: Course) -> Path:
    """Write the recordings of all ranks of the training ``course`` to ``folder``."""
    iterations = len(course.losses)
    about = {"world_size": len(course.ranks), "first": 0, "iterations": iterations}
    for rank, tensors in enumerate(course.ranks):
        writer = RankWriter(folder, rank, {**about, "arguments": course.arguments})
        changed = tensors | course.changed.get(rank, {})
        start = tensors if course.changed_from else changed
        writer.iteration(0, {}, _digests(start, 0))
        for n, (loss, norm) in enumerate(zip(course.losses, course.norms, strict=True), 1):
            last = rank == len(course.ranks) - 1
            losses = {"lm loss": loss} if last else {}
            figures = {"losses": losses, "norm": norm, "skipped": False}
            now = changed if n >= course.changed_from else tensors
            writer.iteration(n, figures, _digests(now, n))
        writer.end(
            (piece, _bytes(values, piece)) for piece, values in changed.items() if not piece.is_copy
        )
    return folder


def _digests(tensors: Tensors, iteration: int) -> dict[Piece, int]:
    """Return a digest of each piece. Any number that follows from the bytes, the piece and the
    iteration will do."""
    return {
        piece: int.from_bytes(_bytes(values, piece).tobytes()[:7], "little")
        + sum(map(int, _bytes(values, piece).tobytes()))
        + iteration
        for piece, values in tensors.items()
    }


def _bytes(values: np.ndarray, piece: Piece) -> memoryview:
    return memoryview(np.ascontiguousarray(values).view(STORED_AS[piece.dtype]).reshape(-1)).cast(
        "B"
    )
