"""Texts for people: counts with nouns, bytes, flags, and suggestions for misspelt names.

Errors and tables of all packages count things, name sizes and suggest names. With one function for
each, the same number reads the same everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import SequenceMatcher

BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

_ALIKE = 0.75  # least likeness of two words for a suggestion, from 0 (nothing in common) to 1
_NEGATIONS = {"no", "not", "non", "disable", "without"}


def counted(number: float, thing: str) -> str:
    """Return a number with its noun: ``1 microbatch``, ``2 microbatches``, ``1.5 ranks``."""
    plural = "es" if thing.endswith("ch") else "s"
    return f"{number if isinstance(number, int) else f'{number:g}'} {thing}{plural * (number != 1)}"


def shown(value: object, longest: int = 80) -> str:
    """Return ``value`` as text for an error.

    It is shortened if it is long, as users' values may have any length.
    """
    text = str(value)
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text):,} characters)"


def argument_flag(name: str) -> str:
    """Return the flag of Megatron's argument ``name``: ``--num-layers`` for ``num_layers``."""
    return f"--{name.replace('_', '-')}"


def unit_for(amount: float) -> str:
    """Return the largest unit of bytes in which ``amount`` is at least 1, or else B."""
    return max((u for u in BYTES if BYTES[u] <= amount), default="B", key=BYTES.__getitem__)


def bytes_text(amount: float) -> str:
    """Return an amount of bytes as text with three digits: ``10 B``, ``8.44 MiB``, ``0.5 GiB``.

    A quarter of a GiB and more is in GiB, as most memory of a rank is.
    """
    amount = min(amount, sys.float_info.max)  # a user's integer may be larger than any float
    unit = unit_for(abs(amount))
    if unit == "MiB" and 4 * abs(amount) >= BYTES["GiB"]:
        unit = "GiB"
    number = amount / BYTES[unit]
    return f"{number:.0f} {unit}" if abs(number) >= 1000 else f"{number:.3g} {unit}"


def meant_by(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names most like a misspelt ``name``: none, one, or several equally good.

    A name that means the opposite is never returned. Capitals, dashes and underscores do not count:
    ``ZB_V`` and ``zbv`` are ``zb-v``.
    """
    likeness = {
        other: _likeness(_plain(name), _plain(other))
        for other in known
        if not is_opposite(name, other)
    }
    most = max(likeness.values(), default=0.0)
    return [other for other, alike in likeness.items() if alike == most >= _ALIKE]


def is_opposite(name: str, other: str) -> bool:
    """Return whether one of two names is the negation of the other.

    ``--no-overlap`` negates ``--overlap``, and ``untie-embeddings`` negates ``tie-embeddings``.
    """
    words, others = _words(name), _words(other)
    if len(words & _NEGATIONS) % 2 != len(others & _NEGATIONS) % 2:
        return True
    return any(f"un{word}" in others for word in words) or any(
        f"un{word}" in words for word in others
    )


def has_similar_words(name: str, other: str) -> bool:
    """Return whether each word of ``name`` resembles a word of ``other``.

    Sharing letters is not enough: ``--use-mpi`` is not ``--use-mup``.
    """
    others = _words(other)
    return all(
        any(_likeness(word, similar) >= _ALIKE for similar in others) for word in _words(name)
    )


def _likeness(name: str, other: str) -> float:
    return SequenceMatcher(None, name, other).ratio()


def _words(name: str) -> set[str]:
    return set(name.lower().replace("_", "-").split("-")) - {""}


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
