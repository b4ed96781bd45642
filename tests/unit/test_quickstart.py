"""The quick start's parts: it prepares as much text as is read, and says how long it will take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts import quickstart
from scripts.prepare_text import documents


def test_no_file_is_read_once_there_are_enough_tokens(tmp_path: Path) -> None:
    """All 37 million tokens of the standard library were written, for 200 thousand to be read."""
    files = [tmp_path / name for name in ("a.py", "b.py", "missing.py")]
    for file in files[:2]:
        file.write_text("12345")
    texts = list(documents(files, enough=10))
    assert [len(text) for text in texts] == [6, 6]  # with the end of the document
    assert np.array_equal(texts[0], [*b"12345", 256])
    with pytest.raises(FileNotFoundError):
        list(documents(files))


def test_time_left_is_told_by_the_last_ten_iterations() -> None:
    def iterations(seconds: list[float]) -> list[quickstart.Iteration]:
        return [
            quickstart.Iteration(number, 40, took, batch=16, loss=3.0)
            for number, took in enumerate(seconds, 1)
        ]

    assert quickstart.seconds_left(iterations([5.0])) == 39 * 5.0
    assert quickstart.seconds_left(iterations([5.0, 1.0])) == 38 * 1.0
    assert quickstart.seconds_left(iterations([5.0] * 10 + [2.0] * 10)) == 20 * 2.0
    assert quickstart.seconds_left(iterations([1.0] * 40)) == 0


def test_the_text_lasts_for_the_iterations() -> None:
    model = quickstart.MODEL
    read = 40 * int(model["--global-batch-size"]) * int(model["--seq-length"])
    assert 10 * read < quickstart.TOKENS < 10_000_000
