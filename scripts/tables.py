"""Tables in Markdown, as pages have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def row(cells: Iterable[object]) -> str:
    """Return the line of a table that has ``cells``."""
    return f"| {' | '.join(map(str, cells))} |\n"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "".join(map(row, (head, ["-"] * len(head), *rows)))
