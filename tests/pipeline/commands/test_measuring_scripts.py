"""Tests that scripts that print numbers of docs/measurements.md run, at small sizes."""

from __future__ import annotations

import pytest

from scripts.benchmarks import schedules, split, start
from tests.helpers.ranks import run_ranks, values


def test_what_making_a_schedule_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """The script that measures how long schedules take to build prints its rows. It used not to
    order the messages, so the proof refused every schedule."""
    words = ["--family", "zb-h1", "v-min", "--ranks", "4", "--microbatches", "8"]
    assert schedules.main(words) == 0
    lines = (line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines())
    rows = [cells for cells in lines if cells[0] in ("zb-h1", "v-min") and len(cells) > 6]
    assert {(family, int(p), int(m)) for family, p, m, *_ in rows} == {
        (family, *size) for family in ("zb-h1", "v-min") for size in ((4, 32), (8, 8))
    }
    assert all(int(actions) > int(p) * int(m) for _, p, m, actions, *_ in rows)


def test_what_a_split_costs() -> None:
    """The script that measures the cost of splitting the backward pass runs. It runs in a forked
    rank, because it patches Megatron and does not undo the patches."""
    words = ["--hidden", "64", "--sequence", "16", "--repetitions", "3"]
    assert values(run_ranks(1, lambda rank: split.main(words), connect=False)) == [0]


def test_what_a_start_costs(capsys: pytest.CaptureFixture[str]) -> None:
    start.main(["--ranks", "20", "--pp", "2", "-m", "2"])
    compared, *built = capsys.readouterr().out.splitlines()
    assert compared.startswith("20 ranks compare their settings in ")
    assert [line.partition(",")[0] for line in built] == list(start.SPECS)
