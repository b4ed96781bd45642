"""Writer of a rank's part of a recording.

``rank-00000.jsonl`` has a line about the run, lines for the pieces of tensors on the rank, a line
for each iteration, and one for the end; an interrupted run leaves the lines so far.
``rank-00000.bin`` has the bytes of the pieces after the last iteration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.recordings.piece import Piece

FORMAT = 1


def lines_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.jsonl"


def bytes_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.bin"


class RankWriter:
    """Writer of the recording of one rank into ``folder``.

    Raises:
        ValueError: the rank has recorded there before, or the folder cannot be written to.
    """

    def __init__(self, folder: Path, rank: int, about: Mapping[str, Any]) -> None:
        self._folder = folder
        self._rank = rank
        self._numbers: dict[Piece, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = lines_file(folder, rank).open("x")
        except FileExistsError:
            raise ValueError(already_there(folder)) from None
        except OSError as error:
            raise ValueError(f"{folder} cannot be written to: {error.strerror}") from None
        self._write({"format": FORMAT, "rank": rank, **about})

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self._lines.write(json.dumps(line) + "\n")
            self._lines.flush()
        except OSError as error:
            raise _disk_is_full(self._folder, error) from None

    def iteration(
        self, iteration: int, figures: Mapping[str, Any], digests: Mapping[Piece, int]
    ) -> None:
        """Write the line of an iteration.

        Args:
            iteration: number of the iteration; that of the start for the state before the first.
            figures: losses, norm of the gradients, and whether the optimizer skipped the step.
            digests: digests of the pieces of tensors on the rank after the iteration.
        """
        new = [piece for piece in digests if piece not in self._numbers]
        if new:
            self._numbers |= {p: n for n, p in enumerate(new, len(self._numbers))}
            self._write({"pieces": [piece.as_data() for piece in new]})
        numbered = {str(self._numbers[piece]): digest for piece, digest in digests.items()}
        self._write({"iteration": iteration, **figures, "digests": numbered})

    def end(self, tensors: Iterator[tuple[Piece, memoryview]]) -> None:
        """Write the bytes of the rank's pieces after the last iteration, and the last line."""
        written: list[Any] = []
        at = 0
        try:
            with bytes_file(self._folder, self._rank).open("wb") as file:
                for piece, content in tensors:
                    file.write(content)
                    written.append([at, *piece.as_data()])
                    at += piece.nbytes
        except OSError as error:
            raise _disk_is_full(self._folder, error) from None
        self._write({"end": True, "bytes": at, "tensors": written})
        self._lines.close()


def already_there(folder: Path) -> str:
    return f"{folder} holds a recording already: name a new folder, or remove that one"


def _disk_is_full(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"{folder} cannot take the recording: {error.strerror}. It holds all parameters and "
        f"optimizer states once: name a folder on a larger disk"
    )
