"""The memory limit of a rank, as people write it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)(x|[KMGT]iB)?")


@dataclass(frozen=True)
class MemoryLimit:
    """At most so many microbatches of a rank's activations, or at most so many bytes of them."""

    microbatches: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        assert (self.microbatches is None) != (self.bytes is None)

    def __str__(self) -> str:
        if self.bytes is not None:
            return f"{self.bytes / 2**30:.3g}GiB"
        return f"{self.microbatches:g} microbatches"


def parse_limit(text: str, ranks: int, microbatches: int) -> MemoryLimit:
    """``5``: microbatches of a rank; ``0.5x``: relative to 1F1B's peak; ``60GiB``: bytes.

    Raises:
        ValueError: ``text`` is none of these, or zero.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(
            f"memory limit {text!r} is not understood: write microbatches of a rank (5), "
            f"a share of 1F1B's peak (0.5x), or bytes (60GiB)"
        )
    number, unit = float(match[1]), match[2]
    if unit is None:
        return MemoryLimit(microbatches=number)
    if unit == "x":
        return MemoryLimit(microbatches=number * min(ranks, microbatches))
    return MemoryLimit(bytes=int(number * _BYTES[unit]))
