"""Words for people: numbers of things, and what a misspelt name was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

_ALIKE = 0.75  # from 0, nothing in common, to 1


def counted(number: float, thing: str) -> str:
    """``1 microbatch``, ``2 microbatches``, ``1.5 ranks``."""
    plural = "es" if thing.endswith("ch") else "s"
    return f"{number if isinstance(number, int) else f'{number:g}'} {thing}{plural * (number != 1)}"


def meant_by(name: str, known: Iterable[str]) -> list[str]:
    """Those of ``known`` that ``name`` resembles most: one, or several that do so equally, or none.

    Capitals, dashes and underscores do not count: ``ZB_V`` and ``zbv`` are ``zb-v``.
    """
    likeness = {
        other: SequenceMatcher(None, _plain(name), _plain(other)).ratio() for other in known
    }
    most = max(likeness.values(), default=0.0)
    return [other for other, alike in likeness.items() if alike == most >= _ALIKE]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
