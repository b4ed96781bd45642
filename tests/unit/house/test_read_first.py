"""Test that the files that CONTRIBUTING.md tells a newcomer to read first exist and are short
enough for one day."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LINES = 2000  # lines of code and text that a newcomer can read on the first day


def test_what_is_read_first_is_short() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition("## Read these first\n")[2].partition("\n## ")[0]
    names = [
        name for line in re.findall(r"(?m)^\d\..*(?:\n   .*)*", section) for name in read(line)
    ]
    assert len(names) >= 10 and "megatron_ext/compile/build.py" in names
    lines = sum(len((ROOT / name).read_text().splitlines()) for name in names)
    assert lines < LINES


def read(item: str) -> list[str]:
    """Return the files that an item of the list names before its description."""
    return re.findall(r"`([^`]+)`", item.partition(": ")[0])
