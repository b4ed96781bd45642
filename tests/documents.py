"""Parts of docs/compatibility.md that tests write, so that they say what the tests saw."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs" / "compatibility.md"


def check_written(part: str, text: str) -> None:
    """Fail unless ``text`` stands between the marks of ``part``; then put it there."""
    begin, end = f"<!-- {part}: written by a test -->", f"<!-- end of {part} -->"
    before, rest = DOCS.read_text().split(begin)
    written, after = rest.split(end)
    if written.strip() != text:
        DOCS.write_text(f"{before}{begin}\n{text}\n{end}{after}")
        pytest.fail(f"docs/{DOCS.name} was out of date; its part {part!r} has been written anew")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["-"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
