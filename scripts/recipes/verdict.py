"""Whether a recipe is accepted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Whether a recipe is accepted under a ``schedule``.

    Attributes:
        why_stock: why stock itself cannot run the recipe; None where it can.
        why: why we refuse it; None where it is accepted.
        without: the settings without which it would be accepted, though refused; empty where that
            does not help.
        microbatches: of a step; None where they are not known.
    """

    schedule: str
    why_stock: str | None = None
    why: str | None = None
    without: tuple[str, ...] = ()
    microbatches: int | None = None

    @property
    def is_accepted(self) -> bool:
        return self.why is None and self.why_stock is None
