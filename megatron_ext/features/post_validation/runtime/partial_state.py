"""Validation state of the gradients of some ranks of a pipeline: the sum that is passed along the
chain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PartialState:
    """Validation state of all ranks up to one of the chain (`features.post_validation.schedule`).

    Attributes:
        squared_norm: squared norm of their gradients.
        found_inf: whether these contain an inf or NaN, as far as the optimizer checks for it.
        tokens: number of tokens in the step's microbatches; only the rank with the loss knows more
            than 0.
    """

    squared_norm: float = 0.0
    found_inf: bool = False
    tokens: int = 0

    def plus(self, other: PartialState) -> PartialState:
        """Return the combined validation state of the ranks of both."""
        return PartialState(
            self.squared_norm + other.squared_norm,
            self.found_inf or other.found_inf,
            self.tokens + other.tokens,
        )
