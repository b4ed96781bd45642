"""What a rank of a pipeline knows of a step's gradients before the last one is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PartialState:
    """Of the gradients of all ranks up to one of the chain; that of the last is the whole state.

    ``squared_norm``: of the unscaled gradients, not clipped. ``found_inf``: the loss scaler has
    found an infinity or a NaN; the norm then means nothing. ``tokens``: how many the loss has
    counted, known only where the loss is.
    """

    squared_norm: float
    found_inf: bool
    tokens: int = 0

    def plus(self, other: PartialState) -> PartialState:
        """The state of the ranks of both."""
        return PartialState(
            self.squared_norm + other.squared_norm,
            self.found_inf or other.found_inf,
            self.tokens + other.tokens,
        )
