"""Parts of pages that tests write, so that they say what the tests saw."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def check_written(part: str, text: str, page: str = "compatibility.md") -> None:
    """Fail unless ``text`` stands between the marks of ``part``; then put it there."""
    begin, end = f"<!-- {part}: written by a test -->", f"<!-- end of {part} -->"
    before, rest = (DOCS / page).read_text().split(begin)
    written, after = rest.split(end)
    if written.strip() != text:
        (DOCS / page).write_text(f"{before}{begin}\n{text}\n{end}{after}")
        pytest.fail(f"docs/{page} was out of date; its part {part!r} has been written anew")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["-"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
