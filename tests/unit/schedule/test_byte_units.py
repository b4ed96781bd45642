"""Tests of amounts of memory as text.

Users used to read "24.8MiB" next to "0.00293GiB" on one line, "3.01e+03 GiB" for a checkpoint, and
"0.00977 KiB" for ten bytes, as each module formatted bytes in its own way.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megatron_ext
from megatron_ext.base.words import bytes_text
from megatron_ext.schedule.limit import MemoryLimit, parse_limit

PACKAGE = Path(megatron_ext.__file__).parent


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (10, "10 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (8.44 * 2**20, "8.44 MiB"),
        (255 * 2**20, "255 MiB"),
        (2**28, "0.25 GiB"),
        (1023 * 2**30, "1023 GiB"),
        (1000 * 2**10, "1000 KiB"),
        (2**30, "1 GiB"),
        (79.25 * 2**30, "79.2 GiB"),
        (3010 * 2**30, "2.94 TiB"),
        (5000 * 2**40, "5000 TiB"),
        (-3 * 2**30, "-3 GiB"),
    ],
)
def test_the_unit_follows_the_amount(amount: float, text: str) -> None:
    assert bytes_text(amount) == text


def test_a_limit_is_written_so_that_it_can_be_read_back() -> None:
    for text in ("60GiB", "3MiB", "200MiB", "2.94TiB", "10B", "1KiB"):
        assert str(parse_limit(text, 1, 1)) == parse_limit(text, 1, 1).written == text
    assert str(MemoryLimit(bytes=3 * 2**20)) == "3MiB"


def test_nothing_else_formats_bytes() -> None:
    """Only one module formats bytes. A division by a unit inside a text would be another format."""
    own = re.compile(r"/ ?(2 ?\*\* ?[234]0|1024|1 ?<< ?[234]0)[^{}\n]*:[^{}\n]*\}")
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if own.search(line)
    ]
    assert not found
