"""Verdict on a recipe: whether it is accepted under a schedule, or why not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Whether a recipe is accepted under a ``schedule``.

    Attributes:
        why_stock: why stock itself cannot run the recipe; None if it can.
        why: why we refuse it; None if it is accepted.
        without: the settings without which a refused recipe would be accepted; empty if that does
            not help.
        microbatches: microbatches of a step; None if not known.
    """

    schedule: str
    why_stock: str | None = None
    why: str | None = None
    without: tuple[str, ...] = ()
    microbatches: int | None = None

    @property
    def is_accepted(self) -> bool:
        return self.why is None and self.why_stock is None
