"""Reader of a rank's part of a recording, which may have been cut off, mixed up or damaged.

Each value is checked before anything uses it: a mistake is one line with the file and the value. An
iteration without a digest that it must have is such a mistake, because nothing would be compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.base.words import bytes_text, counted
from megatron_ext.recordings.piece import STATES, STORED_AS, Piece
from megatron_ext.recordings.writing import FORMAT, bytes_file, lines_file

PieceDigests = Mapping[Piece, int]
_DIGESTS = 1 << 63  # bound of digests, which are signed integers of 64 bits
# Longest line of a recording in bytes. The line of an iteration has a number for each piece of a
# tensor on a rank.
_LONGEST = 2**26
_SHOWN = 60  # longest value in characters that an error shows


@dataclass(frozen=True)
class About:
    """First line of a rank's recording, on the run as a whole.

    Attributes:
        world_size: number of ranks.
        first: iteration from which the run started.
        iterations: number of iterations to record.
        arguments: arguments of Megatron on rank 0; empty on other ranks.
    """

    world_size: int
    first: int
    iterations: int
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class RankIteration:
    """State of a rank after an iteration, or at the start, as a line of its recording has it.

    Attributes:
        number: number of the iteration.
        losses: losses by their names in Megatron's log.
        norm: norm of the gradients; None if it was not computed.
        skipped: whether the optimizer took no step.
        digests: digest of each piece of a tensor on the rank.
    """

    number: int
    losses: Mapping[str, float]
    norm: float | None
    skipped: bool
    digests: PieceDigests


@dataclass(frozen=True)
class RankRecording:
    """Recording of one rank.

    Attributes:
        about: first line of the recording.
        iterations: the state at the start, then the state after each iteration.
        written: for each piece of a tensor after the last iteration, the place of its bytes in the
            rank's second file.
    """

    about: About
    iterations: Sequence[RankIteration]
    written: Mapping[Piece, int]


@dataclass(frozen=True)
class _Line:
    """JSON object in a line of a recording, whose values are checked as they are read."""

    file: Path
    number: int
    data: Mapping[str, Any]

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"{self.file}, line {self.number}: {what}; record it anew")

    def value(self, name: str, is_right: Callable[[Any], bool], kind: str) -> Any:
        """Return the value of ``name`` in the line.

        Args:
            is_right: function that accepts or rejects a value.
            kind: words on what a value must be, for the message.

        Raises:
            ValueError: ``is_right`` rejects the value, or the line has none.
        """
        found = self.data.get(name)
        if not is_right(found):
            raise self.wrong(f"{name!r} is {_shown(found)}, and must be {kind}")
        return found


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 62)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_digests(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(digest) is int and -_DIGESTS <= digest < _DIGESTS for digest in value.values()
    )


def read_about(folder: Path, rank: int) -> About:
    """Return the first line of the recording of ``rank`` in ``folder``.

    Raises:
        ValueError: there is no such line, or another version wrote it.
    """
    return _about(_first_line(lines_file(folder, rank)), rank)


def _first_line(file: Path) -> _Line:
    line = next(_lines(file), None)
    if line is None:
        raise ValueError(f"{file} is cut off: its first line is missing; record the run anew")
    return line


def _about(line: _Line, rank: int) -> About:
    if (version := line.data.get("format")) != FORMAT:
        raise ValueError(
            f"{line.file} was recorded by another version of megatron_ext: its format is "
            f"{_shown(version)}, and only {FORMAT} is known; record it anew"
        )
    line.value("rank", lambda value: value == rank and _is_count(value), f"{rank} in this file")
    arguments = line.value("arguments", lambda value: isinstance(value, dict), "a table")
    try:
        float(arguments.get("clip_grad") or 0)
    except (TypeError, ValueError, OverflowError):
        raise line.wrong(
            f"'clip_grad' is {_shown(arguments['clip_grad'])}, and must be a number"
        ) from None
    return About(
        line.value("world_size", lambda value: _is_count(value) and value > 0, "at least 1"),
        line.value("first", _is_count, "an iteration"),
        line.value("iterations", _is_count, "a number of iterations"),
        arguments,
    )


def read_rank(folder: Path, rank: int, about: About) -> RankRecording:
    """Return the recording of ``rank`` in ``folder``.

    Args:
        about: first line of the recording of rank 0.

    Raises:
        ValueError: a file is missing or damaged, or of another run than rank 0's.
    """
    file = lines_file(folder, rank)
    if not file.is_file():
        raise ValueError(
            f"{folder} lacks the file {file.name} of one of the ranks 0 to "
            f"{about.world_size - 1}; copy the files of all nodes into one folder"
        )
    about_rank = _about(_first_line(file), rank)
    for name in ("world_size", "first", "iterations"):
        ours, theirs = getattr(about_rank, name), getattr(about, name)
        if ours != theirs:
            raise ValueError(
                f"{file} is of another run than the file of rank 0: its {name} is {ours}, and "
                f"rank 0's is {theirs}; copy the files of one run into one folder"
            )
    iterations, end = _contents(file)
    if end is None or len(iterations) != about.iterations + 1:
        done = counted(max(len(iterations) - 1, 0), "iteration")
        raise ValueError(
            f"{file} is cut off: rank {rank} recorded {done} of {about.iterations}, then its run "
            "ended; look at the end of the rank's log, and record the run anew"
        )
    for number, (line, iteration) in enumerate(iterations, about.first):
        if iteration.number != number:
            raise line.wrong(f"'iteration' is {iteration.number}, and must be {number}")
    written = _written(end, bytes_file(folder, rank))
    _check_completeness(iterations, end, written)
    return RankRecording(about_rank, [iteration for _, iteration in iterations], written)


def _contents(file: Path) -> tuple[list[tuple[_Line, RankIteration]], _Line | None]:
    """Return the iterations in the lines of ``file``, and its last line if it is complete."""
    pieces: list[Piece] = []
    iterations: list[tuple[_Line, RankIteration]] = []
    end: _Line | None = None
    for line in _lines(file):
        if end is not None:
            raise line.wrong("a line follows the line that ends the recording")
        if "pieces" in line.data:
            pieces += map(_piece(line), line.value("pieces", _is_list, "a list of pieces"))
        elif "iteration" in line.data:
            iterations.append((line, _iteration(line, pieces)))
        elif "end" in line.data:
            end = line
        elif line.number > 1:
            raise line.wrong(f"{_shown(dict(line.data))} is not a line of a recording")
    return iterations, end


def _lines(file: Path) -> Iterator[_Line]:
    # Lines are read one by one, as a long recording may be larger than this machine's memory.
    with file.open("rb") as opened:
        for number, text in enumerate(iter(partial(opened.readline, _LONGEST + 1), b""), 1):
            if len(text) > _LONGEST:
                raise ValueError(
                    f"{file}, line {number}: the line has more than {bytes_text(_LONGEST)}, more "
                    "than any line of a recording; record the run anew"
                )
            line = _line(file, number, text)
            if line is None:
                return
            yield line


def _line(file: Path, number: int, text: bytes) -> _Line | None:
    """Return the line ``text`` of ``file`` as an object; None if the line was cut off."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        if not text.endswith(b"\n"):
            return None
        start = text[:_SHOWN].decode(errors="replace").rstrip("\n")
        raise ValueError(
            f"{file}, line {number}: {start!r} is not a line of a recording; record the run anew"
        ) from None
    if not isinstance(data, dict):
        raise ValueError(
            f"{file}, line {number}: {_shown(data)} is not a line of a recording; record the run "
            "anew"
        )
    return _Line(file, number, data)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _iteration(line: _Line, pieces: Sequence[Piece]) -> RankIteration:
    numbers = {str(number): piece for number, piece in enumerate(pieces)}
    digests = line.value("digests", _is_digests, "a table of digests of 64 bits")
    if unknown := next((number for number in digests if number not in numbers), None):
        raise line.wrong(
            f"'digests' has an entry {_shown(unknown)}, and no earlier line names a piece of a "
            f"tensor with that number"
        )
    losses, skipped = line.data.get("losses", {}), line.data.get("skipped", False)
    if not _is_numbers(losses):
        raise line.wrong(f"'losses' is {_shown(losses)}, and must be a table of numbers")
    if not isinstance(skipped, bool):
        raise line.wrong(f"'skipped' is {_shown(skipped)}, and must be true or false")
    return RankIteration(
        line.value("iteration", _is_count, "a number"),
        losses,
        line.value("norm", lambda norm: norm is None or _is_number(norm), "a number"),
        skipped,
        {numbers[number]: digest for number, digest in digests.items()},
    )


def _piece(line: _Line) -> Callable[[Any], Piece]:
    def read(data: Any) -> Piece:
        if not _is_piece(data):
            raise line.wrong(f"{_shown(data)} does not describe a piece of a tensor")
        return Piece.from_data(data)

    return read


def _is_piece(data: Any) -> bool:
    if not (isinstance(data, list) and len(data) == 9 and isinstance(data[0], str)):
        return False
    global_shape, offset, shape, start, stop, dtype, is_copy = data[2:]
    if not all(_is_list(sizes) and all(map(_is_count, sizes)) for sizes in data[1:5]):
        return False
    return (
        len(global_shape) == len(offset) == len(shape)
        and all(o + s <= w for o, s, w in zip(offset, shape, global_shape, strict=True))
        and all(map(_is_count, (start, stop)))
        and start <= stop <= math.prod(shape)
        and isinstance(dtype, str)
        and dtype in STORED_AS
        and isinstance(is_copy, bool)
    )


def _written(end: _Line, file: Path) -> dict[Piece, int]:
    """Return the places of pieces in ``file``, which has their bytes one after the other.

    Args:
        end: last line of the recording, which lists the pieces.
    """
    length = end.value("bytes", _is_count, "a number of bytes")
    size = file.stat().st_size if file.is_file() else 0
    if size < length:
        raise ValueError(
            f"the recording {file.parent} is cut off: {file.name} has {size} of {length} bytes; "
            "record the run anew"
        )
    written: dict[Piece, int] = {}
    at = 0
    for data in end.value("tensors", _is_list, "a list of pieces"):
        if not (_is_list(data) and data and data[0] == at and _is_count(data[0])):
            raise end.wrong(
                f"{_shown(data)} does not describe a piece of a tensor that begins at byte {at}"
            )
        piece = _piece(end)(data[1:])
        if piece in written:
            raise end.wrong(f"the piece {_shown(data)} of a tensor occurs twice")
        written[piece] = at
        at += piece.nbytes
    if at != length:
        raise end.wrong(f"'bytes' is {length}, and the tensors have {at} bytes together")
    return written


def _check_completeness(
    iterations: Sequence[tuple[_Line, RankIteration]], end: _Line, written: Mapping[Piece, int]
) -> None:
    """Raise ValueError unless each iteration has the digests that the rank had written.

    Parameters have digests at the start and after each iteration. Where the next step gathers them,
    they have digests at the start only. Optimizer states may begin later, and none of them ends.

    Args:
        end: last line of the recording.
        written: pieces whose bytes the rank wrote after the last iteration.
    """
    parameters = [_pieces(iteration, is_state=False) for _, iteration in iterations]
    states = [_pieces(iteration, is_state=True) for _, iteration in iterations]
    usual = parameters[1] if len(parameters) > 1 and not parameters[1] else parameters[0]
    for n, (line, _) in enumerate(iterations):
        expected = usual if n else parameters[0]
        if lacking := (expected - parameters[n]) | (states[n - 1] - states[n] if n else set()):
            raise line.wrong(f"'digests' lacks the tensors {_names(lacking)}")
        if unexpected := parameters[n] - expected:
            raise line.wrong(
                f"'digests' has the tensors {_names(unexpected)}, which the lines of other "
                "iterations lack"
            )
    stored = {p for p in parameters[0] | states[-1] if not p.is_copy and p.numel}
    if different := stored ^ written.keys():
        raise end.wrong(
            f"these tensors have either digests or bytes, but not both: {_names(different)}"
        )


def _pieces(iteration: RankIteration, *, is_state: bool) -> set[Piece]:
    return {p for p in iteration.digests if p.name.startswith(STATES) == is_state}


def _names(pieces: set[Piece]) -> str:
    names = sorted({piece.name for piece in pieces})
    return _shown(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
