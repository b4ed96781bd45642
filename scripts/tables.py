"""Tables in Markdown, and parts of pages that scripts write, between marks.

A number that a script can make is not typed: the script replaces what stands between two marks of
the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def row(cells: Iterable[object]) -> str:
    """Return the line of a Markdown table that has ``cells``."""
    return f"| {' | '.join(map(str, cells))} |\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "".join(map(row, (headings, ["-"] * len(headings), *rows)))


def part(page: str, name: str) -> str:
    """Return the text between the marks of ``name`` on a page."""
    return _divided(page, name)[1].strip()


def with_part(page: str, name: str, text: str) -> str:
    """Return the text ``page`` with ``text`` between the marks of ``name``."""
    before, _, after = _divided(page, name)
    begin, end = _markers(name)
    return f"{before}{begin}\n{text.strip()}\n{end}{after}"


def _divided(page: str, name: str) -> tuple[str, str, str]:
    """Return the texts before, between and after the marks of ``name``.

    Raises:
        ValueError: ``page`` does not have these marks once.
    """
    begin, end = _markers(name)
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must have each of the marks {begin} and {end} once")
    before, rest = page.split(begin)
    between, after = rest.split(end)
    return before, between, after


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by a script -->", f"<!-- end of {name} -->"
