"""Recording of a run, read from the folder into which all ranks wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.recordings.piece import STORED_AS, Piece, Place
from megatron_ext.recordings.ulps import Bits
from megatron_ext.recordings.writing import FORMAT, bytes_file, lines_file
from megatron_ext.words import counted

Tensor = tuple[str, tuple[int, ...]]  # its name in torch_dist, and its index there
Copies = Mapping[Place, Sequence[tuple[int, int]]]  # of a tensor: rank and digest for each place
_SUM = 1 << 64  # digests of pieces add up to the tensor's, modulo this


def name_of(tensor: Tensor) -> str:
    """Return the readable name: ``decoder.layers.mlp.linear_fc1.weight[3]``."""
    name, index = tensor
    return name + (f"[{','.join(map(str, index))}]" if index else "")


@dataclass(frozen=True)
class StoredPiece:
    """Piece with the place of its bytes: ``offset`` in ``file``."""

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
    """State of the ranks after an iteration.

    Attributes:
        losses: by their names in Megatron's log.
        norm: of the gradients; None if it was not computed.
        skipped: whether the optimizer took no step.
        digests: digest of each piece, by the rank that has it.
    """

    number: int
    losses: Mapping[str, float]
    norm: float | None
    skipped: bool
    digests: Mapping[int, Mapping[Piece, int]]

    @cached_property
    def tensors(self) -> Mapping[Tensor, Copies]:
        """Pieces of each tensor, by their places, with the ranks that have them."""
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
        first: the iteration from which the run started; 0 without a checkpoint.
        arguments: Megatron's, as far as they are plain values.
        iterations: the starting state, then each iteration.
        tensors: pieces after the last iteration, each once.
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

    def whole(self, tensor: Tensor) -> tuple[str, Bits]:
        """Return the type and the bits of a whole tensor.

        Raises:
            ValueError: the tensor was not recorded completely.
        """
        held = self.tensors[tensor]
        piece = held[0].piece
        bits = np.empty(piece.whole, STORED_AS[piece.dtype])
        filled = 0
        for part in held:
            filled += part.piece.numel
            _put(bits, part)
        if filled < bits.size:
            raise ValueError(
                f"{self.folder}: {name_of(tensor)} has {bits.size} elements, and only {filled} "
                f"were recorded: record again; if that does not help, report this with your launch "
                f"command"
            )
        return piece.dtype, bits


def _put(whole: Bits, part: StoredPiece) -> None:
    piece = part.piece
    where = tuple(
        slice(first, first + size) for first, size in zip(piece.offset, piece.shape, strict=True)
    )
    if piece.is_whole_shard:
        whole[where] = part.bits().reshape(piece.shape)
        return
    shard = whole[where].copy().reshape(-1)
    shard[piece.start : piece.stop] = part.bits()
    whole[where] = shard.reshape(piece.shape)


def read_recording(folder: Path) -> RunRecording:
    """Read the recording that `megatron-ext parity record` wrote into ``folder``.

    Raises:
        ValueError: there is no recording, or it is incomplete.
    """
    if not lines_file(folder, 0).is_file():
        raise ValueError(
            f"{folder} holds no recording (no {lines_file(folder, 0).name}): write a recording "
            f"with megatron-ext parity record {folder} -- COMMAND"
        )
    about, *_ = _read(lines_file(folder, 0))
    if about.get("format") != FORMAT:
        raise ValueError(
            f"{folder} was recorded by another version of megatron_ext: its format is "
            f"{about.get('format')}, and only {FORMAT} is known; record it anew"
        )
    ranks = [_rank(folder, rank, about) for rank in range(about["world_size"])]
    ends = [end["tensors"] for _, end in ranks]
    return RunRecording(
        folder,
        about["world_size"],
        about["first"],
        about["arguments"],
        [_iteration([lines[n] for lines, _ in ranks]) for n in range(about["iterations"] + 1)],
        _held(folder, ends),
    )


def _read(file: Path) -> Iterator[dict[str, Any]]:
    for text in file.read_text().splitlines():
        try:
            yield json.loads(text)
        except ValueError:  # the line at which it was cut off
            return


def _rank(
    folder: Path, rank: int, about: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the lines of a rank's iterations, with pieces instead of their numbers, and its last
    line."""
    file = lines_file(folder, rank)
    pieces: list[Piece] = []
    iterations: list[dict[str, Any]] = []
    end: dict[str, Any] | None = None
    for line in _read(file) if file.is_file() else ():
        if "pieces" in line:
            pieces += map(Piece.from_data, line["pieces"])
        elif "iteration" in line:
            digests = {pieces[int(number)]: value for number, value in line["digests"].items()}
            iterations.append({**line, "digests": digests})
        elif "end" in line:
            end = line
    if not file.is_file():
        raise ValueError(
            f"{folder} lacks {file.name}: ranks 0 to {about['world_size'] - 1} recorded; copy the "
            f"files of all nodes into one folder"
        )
    if end is None or len(iterations) != about["iterations"] + 1:
        done = counted(max(len(iterations) - 1, 0), "iteration")
        raise ValueError(
            f"{folder} is cut off: rank {rank} recorded {done} of {about['iterations']}, then its "
            f"run ended; look at the end of its log, and record anew"
        )
    data = bytes_file(folder, rank)
    size = data.stat().st_size if data.is_file() else 0
    if size < end["bytes"]:
        raise ValueError(
            f"{folder} is cut off: {data.name} has {size} of {end['bytes']} bytes; record anew"
        )
    return iterations, end


def _iteration(lines: Sequence[Mapping[str, Any]]) -> Iteration:
    """Merge the lines of all ranks for one iteration."""
    losses: dict[str, float] = {}
    for line in lines:
        losses |= line.get("losses", {})
    norms = [line["norm"] for line in lines if line.get("norm") is not None]
    return Iteration(
        lines[0]["iteration"],
        losses,
        norms[0] if norms else None,
        any(line.get("skipped", False) for line in lines),
        {rank: line["digests"] for rank, line in enumerate(lines)},
    )


def _held(folder: Path, ends: Sequence[Sequence[Any]]) -> dict[Tensor, list[StoredPiece]]:
    tensors: dict[Tensor, list[StoredPiece]] = {}
    places = set()
    for rank, written in enumerate(ends):
        file = bytes_file(folder, rank)
        for offset, *data in written:
            piece = Piece.from_data(data)
            tensor = piece.name, piece.index
            if (tensor, piece.place) not in places:
                places.add((tensor, piece.place))
                tensors.setdefault(tensor, []).append(StoredPiece(piece, file, offset))
    return tensors


def digest_of(copies: Copies) -> tuple[int, int]:
    """Return a tensor's digest from its pieces' digests, and the number of elements covered."""
    total = sum(held[0][1] for held in copies.values()) % _SUM
    return total, sum(stop - start for _, _, start, stop in copies)
