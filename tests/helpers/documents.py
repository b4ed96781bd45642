"""Parts of pages that are written from the code, and tests that compare them with it."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"

WRITE_PAGES = "--write-pages"  # option of pytest; if it is given, `conftest` sets the next variable
writes_pages = False


def check_written(part: str, text: str, page: str = "compatibility.md") -> None:
    """Fail unless ``text`` is between the marks of ``part`` on ``page``. With `WRITE_PAGES`, write
    it there."""
    marks = f"<!-- {part}: written by a test -->", f"<!-- end of {part} -->"
    check_between(f"docs/{page}", marks, text, part)


def check_between(name: str, marks: tuple[str, str], text: str, part: str) -> None:
    """Fail unless ``text`` is between the two ``marks``, which the file ``name`` has once. With
    `WRITE_PAGES`, write it there. Errors call the text ``part``."""
    file, (begin, end) = DOCS.parent / name, marks
    before, rest = file.read_text().split(begin)
    written, after = rest.split(end)
    if written.strip("\n") == text:
        return
    if writes_pages:
        file.write_text(f"{before}{begin}\n{text}\n{end}{after}")
        return
    difference = difflib.unified_diff(
        written.strip("\n").splitlines(), text.splitlines(), name, "the code", lineterm=""
    )
    test = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")
    pytest.fail(
        "\n".join(difference)
        + f"\n{name} is out of date in its part {part!r}; to write it: "
        + f"python -m pytest {WRITE_PAGES} '{test}'",
        pytrace=False,
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["-"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
