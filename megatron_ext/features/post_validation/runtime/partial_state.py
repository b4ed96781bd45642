"""Validation state of the gradients of some ranks of a pipeline: the sum that is passed along the
chain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PartialState:
    """Validation state of the gradients of a rank and all earlier ranks of the pipeline's chain.

    Attributes:
        squared_norm: squared norm of their gradients.
        found_inf: whether their gradients contain an inf or NaN, as far as the optimizer checks for
            it.
        tokens: number of tokens in the step's microbatches; 0 without the rank that has the loss.
    """

    squared_norm: float = 0.0
    found_inf: bool = False
    tokens: int = 0

    def plus(self, other: PartialState) -> PartialState:
        """Return the validation state of the ranks of this state and those of ``other``."""
        return PartialState(
            self.squared_norm + other.squared_norm,
            self.found_inf or other.found_inf,
            self.tokens + other.tokens,
        )
