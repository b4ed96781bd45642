"""Memory limit of a rank, and its text form.

Users know their limit in bytes, papers state it in microbatches, and a comparison is often one with
1F1B. All three are one type, which compares sums of shares without being misled by rounding.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from megatron_ext.base.words import BYTES, bytes_text, counted, shown, unit_for

_LARGEST = 1e15  # largest limit, in microbatches or in bytes
_TEXT = re.compile(r"(\d+(?:\.\d+)?)(x|[KMGT]iB|B)?")


@dataclass(frozen=True)
class MemoryLimit:
    """Limit of the activations that a rank stores, in bytes or in microbatches.

    One microbatch counts as all its activations on one rank.
    """

    microbatches: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        assert (self.microbatches is None) != (self.bytes is None)

    def __str__(self) -> str:
        if self.bytes is not None:
            return bytes_text(self.bytes).replace(" ", "")
        assert self.microbatches is not None
        return counted(self.microbatches, "microbatch")

    def at_least(self, amount: float) -> str:
        """Return the least memory limit that allows ``amount``, as text for `parse_limit`.

        The text has the unit of this limit and three decimals, rounded up.
        """
        if self.bytes is None:
            number = _round_up(amount)
            return f"{number} microbatch{'es' * (number != '1')}"
        amount = math.ceil(amount * _SLIGHTLY_LESS)
        unit = unit_for(amount)
        return f"{_round_up(amount / BYTES[unit])}{unit}"

    def scaled(self, factor: float) -> MemoryLimit:
        """Return this memory limit times ``factor``, in the same unit (microbatches or bytes)."""
        return self.of(self.amount * factor)

    @property
    def amount(self) -> float:
        """Amount of memory that this limit allows, in its unit: microbatches or bytes."""
        return self.microbatches if self.microbatches is not None else float(self.bytes or 0)

    def of(self, amount: float) -> MemoryLimit:
        """Return a memory limit of ``amount`` in the unit of this limit (microbatches or bytes)."""
        if self.microbatches is not None:
            return MemoryLimit(microbatches=amount)
        return MemoryLimit(bytes=int(amount))

    @property
    def written(self) -> str:
        """This memory limit as text for `parse_limit`, with three decimals.

        Bytes are rounded down. Microbatches are rounded up, so that thirds of a microbatch still
        fit.
        """
        if self.bytes is None:
            assert self.microbatches is not None
            return _round_up(self.microbatches)
        unit = unit_for(self.bytes)
        thousandths = math.floor(self.bytes / BYTES[unit] * 1000)
        # `parse_limit` rounds bytes down, so one of the two neighbouring numbers with three
        # decimals may be read back as the same bytes, and is used.
        for number in (thousandths, thousandths + 1):
            if int(number / 1000 * BYTES[unit]) == self.bytes:
                thousandths = number
                break
        return _decimals(thousandths) + unit

    def as_written(self) -> MemoryLimit:
        """Return the memory limit that `parse_limit` reads from this limit's text (`written`)."""
        return parse_limit(self.written, ranks=1, microbatches=1)


def with_rounding(allowed: float) -> float:
    """Return the ``allowed`` memory plus a margin for the rounding error of a sum of shares."""
    return allowed * (1 + 1e-9)


def fits(held: float, allowed: float) -> bool:
    """Return whether ``held`` memory is within ``allowed``, but for rounding errors of sums."""
    return held <= with_rounding(allowed)


# Tolerance of comparisons, as a sum of shares may be too large in its last digits.
_SLIGHTLY_LESS = 1 - 1e-12


def _round_up(number: float) -> str:
    return _decimals(math.ceil(number * 1000 * _SLIGHTLY_LESS))


def _decimals(thousandths: int) -> str:
    return f"{thousandths / 1000:.3f}".rstrip("0").rstrip(".")


def parse_limit(text: str, ranks: int, microbatches: int) -> MemoryLimit:
    """Read a memory limit: ``5`` (microbatches on a rank), ``0.5x`` (of 1F1B's peak) or ``60GiB``.

    Raises:
        ValueError: ``text`` is none of these, zero, or beyond any machine.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) < _LARGEST:
        raise ValueError(
            f"memory limit {shown(text)!r} is not understood: write microbatches of a rank (5), "
            f"a share of 1F1B's peak (0.5x), or bytes (60GiB); omit it for no limit"
        )
    number, unit = float(match[1]), match[2]
    if unit is None:
        return MemoryLimit(microbatches=number)
    if unit == "x":
        return MemoryLimit(microbatches=number * min(ranks, microbatches))
    return MemoryLimit(bytes=int(number * BYTES[unit]))
