"""Recording of a run, read from the folder into which all ranks wrote.

Each rank writes what it has. Only together do they have whole tensors, digests and losses, in terms
that do not depend on how ranks shared the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.recordings.piece import STORED_AS, Piece, Place
from megatron_ext.recordings.reading import RankIteration, read_about, read_rank
from megatron_ext.recordings.ulps import Bits
from megatron_ext.recordings.writing import bytes_file, lines_file

Tensor = tuple[str, tuple[int, ...]]  # a tensor's name in torch_dist, and its index there
# Copies of a tensor's piece: rank and digest of each copy.
Copies = Mapping[Place, Sequence[tuple[int, int]]]
_SUM = 1 << 64  # modulus of digests; the digests of a tensor's pieces add up to the tensor's digest


def readable_name(tensor: Tensor) -> str:
    """Return the name of ``tensor`` as text, as in ``decoder.layers.mlp.linear_fc1.weight[3]``."""
    name, index = tensor
    return name + (f"[{','.join(map(str, index))}]" if index else "")


@dataclass(frozen=True)
class StoredPiece:
    """Piece of a tensor with the place of its bytes: at ``offset`` in ``file``."""

    piece: Piece
    file: Path
    offset: int

    def bits(self) -> Bits:
        dtype = np.dtype(STORED_AS[self.piece.dtype])
        if not self.piece.numel:
            return np.empty(0, dtype)
        return np.memmap(self.file, dtype, "r", self.offset, (self.piece.numel,))


@dataclass(frozen=True)
class Iteration:
    """State of all ranks after an iteration.

    Attributes:
        number: number of the iteration.
        losses: losses by their names in Megatron's log.
        norm: norm of the gradients; None if it was not computed.
        skipped: whether the optimizer took no step.
        digests: for each rank, the digest of each piece of a tensor that it has.
    """

    number: int
    losses: Mapping[str, float]
    norm: float | None
    skipped: bool
    digests: Mapping[int, Mapping[Piece, int]]

    @cached_property
    def tensors(self) -> Mapping[Tensor, Copies]:
        """Pieces of each tensor by their places, with the ranks that have them and digests."""
        tensors: dict[Tensor, dict[Place, list[tuple[int, int]]]] = {}
        for rank, digests in self.digests.items():
            for piece, digest in digests.items():
                copies = tensors.setdefault((piece.name, piece.index), {})
                copies.setdefault(piece.place, []).append((rank, digest))
        return tensors


@dataclass(frozen=True)
class RunRecording:
    """Recording of all ranks of a run, read from ``folder``.

    Attributes:
        world_size: number of ranks.
        first: iteration from which the run started; 0 without a checkpoint.
        arguments: arguments of Megatron that are plain values.
        iterations: the state at the start, then the state after each iteration.
        tensors: pieces of each tensor after the last iteration, without copies.
    """

    folder: Path
    world_size: int
    first: int
    arguments: Mapping[str, Any]
    iterations: Sequence[Iteration]
    tensors: Mapping[Tensor, Sequence[StoredPiece]] = field(repr=False)

    @property
    def trained(self) -> Sequence[Iteration]:
        return self.iterations[1:]

    def full_tensor(self, tensor: Tensor) -> tuple[str, Bits]:
        """Return the type of a tensor, and the bits of all of its elements.

        Raises:
            ValueError: the tensor was not recorded completely.
        """
        held = self.tensors[tensor]
        piece = held[0].piece
        size, recorded = math.prod(piece.global_shape), sum(part.piece.numel for part in held)
        if recorded < size:
            raise ValueError(
                f"{self.folder}: {readable_name(tensor)} has {size} elements, and only {recorded} "
                "were recorded: record the run anew; if that does not help, report this error "
                "with your launch command"
            )
        bits = np.zeros(piece.global_shape, STORED_AS[piece.dtype])
        for part in held:
            _put(bits, part)
        return piece.dtype, bits


def _put(full_tensor: Bits, part: StoredPiece) -> None:
    piece = part.piece
    where = tuple(
        slice(first, first + size) for first, size in zip(piece.offset, piece.shape, strict=True)
    )
    if piece.is_whole_shard:
        full_tensor[where] = part.bits().reshape(piece.shape)
        return
    shard = full_tensor[where].copy().reshape(-1)
    shard[piece.start : piece.stop] = part.bits()
    full_tensor[where] = shard.reshape(piece.shape)


def read_recording(folder: Path) -> RunRecording:
    """Return the recording that ``megatron-ext parity record`` wrote into ``folder``.

    Raises:
        ValueError: there is no recording, or it is incomplete or damaged.
    """
    if not lines_file(folder, 0).is_file():
        raise ValueError(
            f"{folder} has no recording (no {lines_file(folder, 0).name}): write a recording with "
            f"megatron-ext parity record {folder} -- COMMAND"
        )
    about = read_about(folder, 0)
    ranks = [read_rank(folder, rank, about) for rank in range(about.world_size)]
    if not any(rank.iterations[0].digests for rank in ranks):
        raise ValueError(f"the recording {folder} has no tensor of any rank: record the run anew")
    return RunRecording(
        folder,
        about.world_size,
        about.first,
        about.arguments,
        [_iteration([rank.iterations[n] for rank in ranks]) for n in range(about.iterations + 1)],
        _held(folder, [rank.written for rank in ranks]),
    )


def _iteration(ranks: Sequence[RankIteration]) -> Iteration:
    """Return the state of all ranks after an iteration, put together from that of each rank."""
    losses: dict[str, float] = {}
    for rank in ranks:
        losses |= rank.losses
    norms = [rank.norm for rank in ranks if rank.norm is not None]
    return Iteration(
        ranks[0].number,
        losses,
        norms[0] if norms else None,
        any(rank.skipped for rank in ranks),
        {number: rank.digests for number, rank in enumerate(ranks)},
    )


def _held(folder: Path, ranks: Sequence[Mapping[Piece, int]]) -> dict[Tensor, list[StoredPiece]]:
    tensors: dict[Tensor, list[StoredPiece]] = {}
    places = set()
    for rank, written in enumerate(ranks):
        file = bytes_file(folder, rank)
        for piece, offset in written.items():
            tensor = piece.name, piece.index
            if (tensor, piece.place) in places:
                continue
            places.add((tensor, piece.place))
            held = tensors.setdefault(tensor, [])
            held.append(StoredPiece(piece, file, offset))
            first = held[0].piece
            if (piece.global_shape, piece.dtype) != (first.global_shape, first.dtype):
                raise ValueError(
                    f"{lines_file(folder, rank)}: {readable_name(tensor)} has the shape "
                    f"{piece.global_shape} of {piece.dtype}, but {first.global_shape} of "
                    f"{first.dtype} in {held[0].file.name}; record the run anew"
                )
    return tensors


def digest_of(copies: Copies) -> tuple[int, int]:
    """Return the digest of a tensor, the sum of its pieces', and their number of elements."""
    total = sum(held[0][1] for held in copies.values()) % _SUM
    return total, sum(stop - start for _, _, start, stop in copies)
