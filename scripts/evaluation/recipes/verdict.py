"""Verdict on a recipe: whether it is accepted under a schedule, or why not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Whether a recipe is accepted under a ``schedule``, and why not.

    Attributes:
        why_stock: why Megatron itself cannot run the recipe; None if it can.
        why: why we refuse it; None if we accept it.
        without: the settings that have to be removed from a refused recipe so that it is accepted;
            empty if that is not enough.
        microbatches: number of microbatches of a step; None if it is not known.
    """

    schedule: str
    why_stock: str | None = None
    why: str | None = None
    without: tuple[str, ...] = ()
    microbatches: int | None = None

    @property
    def is_accepted(self) -> bool:
        return self.why is None and self.why_stock is None
