"""A training that builds its schedule for long says so, on global rank 0.

v-auto searched for half a minute inside iteration 1, and nothing told it from a hang.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from megatron_ext import logger
from megatron_ext.logger import telling_of_long_work
from megatron_ext.schedule.progress import reporting, task
from tests.helpers.ranks import run_ranks, values
from tests.pipeline.test_callers import installed, step

RANKS = 2
FAMILY = """
import time
from megatron_ext.families import Problem, Schedule, family, line
from megatron_ext.schedule.families.line import gpipe

@family("slow", line, source="a test")
def slow(problem: Problem) -> Schedule:
    time.sleep(0.5)
    return gpipe(problem)
"""


@pytest.fixture(autouse=True)
def told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "reporting", functools.partial(reporting, first=0.1))


def test_a_step_says_that_it_builds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "slow.py"
    file.write_text(FAMILY)

    def built(rank: int) -> None:
        with installed(RANKS, schedule=str(file)):
            step(own_groups=False)

    values(run_ranks(RANKS, built))
    lines = [line for line in capfd.readouterr().out.splitlines() if "building" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"megatron_ext: building {file} for ") and "so far" in lines[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_global_rank_0_tells_for_all(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    with telling_of_long_work(rank), task("searching", seconds=60) as work:
        while rank == 0 and work.elapsed < 0.5:
            pass
    told = capsys.readouterr().out
    assert ("megatron_ext: searching" in told and "more at the most" in told) == (rank == 0)
