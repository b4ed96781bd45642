"""Tests of the parts of the quick start: it prepares as much text as it reads, and says how long it
will take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import choose
from megatron_ext.observe.program_summary import stock_1f1b, summarize
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem
from scripts import quickstart
from scripts.prepare_text import documents


def test_no_file_is_read_once_there_are_enough_tokens(tmp_path: Path) -> None:
    """The quick start stops reading files once it has enough tokens. It used to write all 37
    million tokens of the standard library and read 200 thousand of them."""
    files = [tmp_path / name for name in ("a.py", "b.py", "missing.py")]
    for file in files[:2]:
        file.write_text("12345")
    texts = list(documents(files, enough=10))
    assert [len(text) for text in texts] == [6, 6]  # with the end of the document
    assert np.array_equal(texts[0], [*b"12345", 256])
    with pytest.raises(FileNotFoundError):
        list(documents(files))


def test_time_left_is_estimated_from_the_last_ten_iterations() -> None:
    def iterations(seconds: list[float]) -> list[quickstart.Iteration]:
        return [
            quickstart.Iteration(number, 40, took, batch=16, loss=3.0)
            for number, took in enumerate(seconds, 1)
        ]

    assert quickstart.seconds_left(iterations([5.0])) == 39 * 5.0
    assert quickstart.seconds_left(iterations([5.0, 1.0])) == 38 * 1.0
    assert quickstart.seconds_left(iterations([5.0] * 10 + [2.0] * 10)) == 20 * 2.0
    assert quickstart.seconds_left(iterations([1.0] * 40)) == 0


def test_the_picture_is_of_the_costs_in_the_start_up_line() -> None:
    """The quick start reads the costs of its picture from the line that a training prints at its
    start, so a change of that line must change its pattern too."""
    placement = line(4)
    problem = Problem(placement, 8, parse_costs("f=1e-2,i=1.2e-2,w=8e-3,comm=1e-3", placement))
    summary = summarize(build_program(choose("zb-h1"), problem))
    match = quickstart.PREDICTION.search(f"[rank3]: megatron_ext: {summary}")
    assert match and match[1] == "8"
    again = Problem(placement, 8, parse_costs(match[2], placement))
    assert not quickstart.PREDICTION.search(f"megatron_ext: {summary}".replace("f=", "f=0.1.."))
    assert stock_1f1b(again).makespan == pytest.approx(stock_1f1b(problem).makespan, rel=0.02)


def test_the_text_lasts_for_the_iterations() -> None:
    model = quickstart.MODEL
    read = 40 * int(model["--global-batch-size"]) * int(model["--seq-length"])
    assert 10 * read < quickstart.TOKENS < 10_000_000
