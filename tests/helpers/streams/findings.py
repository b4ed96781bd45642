"""Findings of the stream checks on one rank, and the number of its ordered accesses that crossed
streams."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field

FOUND = "findings on emulated streams"


@dataclass
class Findings:
    """Findings of the checks of one rank.

    Attributes:
        found: the text of each finding, with the number of times that it was found.
        crossings: by the names of two streams, the number of accesses on the second one to a
            storage that the first one has accessed before, in order. A run without any has shown
            nothing.
    """

    found: Counter[str] = field(default_factory=Counter)
    crossings: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, text: str) -> None:
        """Add a finding, with the place in the sources that has led to it."""
        self.found[f"{text} (found at {caller()})"] += 1

    def check(self, at_least: int) -> None:
        """Raise an AssertionError for any finding, and for fewer crossings than ``at_least``."""
        texts = [f"{times} x {text}" for text, times in self.found.most_common()]
        assert not texts, f"{len(self.found)} {FOUND}:\n" + "\n".join(texts)
        seen = self.crossings.total()
        assert seen >= at_least, (
            f"only {seen} accesses crossed streams, where at least {at_least} were expected: "
            f"{dict(self.crossings)}"
        )


def caller() -> str:
    """Return the places in Megatron's sources, and in ours, that the call comes from."""
    frame = sys._getframe(1)
    places: list[str] = []
    while frame.f_back is not None and len(places) < _PLACES:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(("megatron.", "megatron_ext.")) and module != _PATCHES:
            places.append(f"{module.rpartition('.')[2]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(places) or "the top"


_PLACES = 3
_PATCHES = "megatron_ext.patches.engine"
