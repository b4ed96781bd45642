"""A training that builds its schedule for long says so, on global rank 0.

v-auto searched for half a minute inside iteration 1, and nothing told it from a hang.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_ext import logger
from megatron_ext.adapter.race import step_race
from megatron_ext.logger import telling_of_long_work
from megatron_ext.schedule.families import zb_auto
from megatron_ext.schedule.progress import reporting, task
from megatron_ext.schedule.search import best
from tests.helpers.megatron_runs import model_flags, train
from tests.helpers.ranks import run_ranks, values
from tests.helpers.short_search import shorten_search
from tests.pipeline.test_callers import installed, step

pytestmark = pytest.mark.real_time

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


@pytest.mark.parametrize(
    "ours",
    [
        {"pipeline_schedule": "zb-auto", "train_iters": 1},
        {"pipeline_race": "v-auto", "train_iters": step_race.FIRST + 1},
    ],
)
def test_no_rank_searches_before_there_are_process_groups(
    ours: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank of a launch checks the arguments, and each searched for a minute there. Then one
    rank searched once more, for the program that runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shorten_search(monkeypatch)
    entered = tmp_path / "entered"
    entered.touch()

    def noted(search: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(search)
        def noting(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("trials") is None:  # else it is what stands in for a search
                with entered.open("a") as file:
                    file.write(f"rank {dist.get_rank()}\n" if dist.is_initialized() else "early\n")
            return search(*args, **kwargs)

        return noting

    for module, name in ((best, "searched"), (zb_auto, "_best")):
        monkeypatch.setattr(module, name, noted(vars(module)[name]))
    flags = model_flags(pipeline_model_parallel_size=2, global_batch_size=4, **ours)
    train(2, flags)
    assert set(entered.read_text().splitlines()) == {"rank 0"}
