"""Tests that a training that builds its schedule for long says so, on global rank 0.

The family v-auto used to search for half a minute inside iteration 1 without a line, which looked
like a hang.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_ext.adapter import arguments, programs
from megatron_ext.adapter.job import Job, job_costs
from megatron_ext.base import logger
from megatron_ext.base.logger import telling_of_long_work
from megatron_ext.base.progress import reporting, task
from megatron_ext.compile import build
from megatron_ext.config import CostsSource
from megatron_ext.features.race.adapter import step_race
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule_families import zb_auto
from megatron_ext.search import best
from tests.helpers.megatron_runs import model_flags, train
from tests.helpers.ranks import run_ranks, values
from tests.helpers.short_search import shorten_search
from tests.pipeline.callers.test_callers import installed, step

pytestmark = pytest.mark.real_time

RANKS = 2
FAMILY = """
import time
from megatron_ext.families import Problem, Schedule, family, line
from megatron_ext.schedule_families.line import gpipe

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
def test_global_rank_0_reports_for_all(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
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
    """No rank searches for a schedule before there are process groups. Every rank of a launch
    checks the arguments, and each used to search for a minute in that check. Then one rank searched
    once more, for the program that runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shorten_search(monkeypatch)
    entered = tmp_path / "entered"
    entered.touch()

    def noted(search: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(search)
        def noting(*args: Any, **kwargs: Any) -> Any:
            # With ``trials`` the call only makes the schedule that stands in for a search.
            if kwargs.get("trials") is None:
                with entered.open("a") as file:
                    file.write(f"rank {dist.get_rank()}\n" if dist.is_initialized() else "early\n")
            return search(*args, **kwargs)

        return noting

    for module, name in ((best, "searched"), (zb_auto, "_best")):
        monkeypatch.setattr(module, name, noted(vars(module)[name]))
    flags = model_flags(pipeline_model_parallel_size=2, global_batch_size=4, **ours)
    train(2, flags)
    assert set(entered.read_text().splitlines()) == {"rank 0"}


def noting_proofs(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Patch proofs outside a search, and searches, so that each leaves a line in ``file`` with its
    schedule and its rank, or that there were no ranks yet."""
    searching = [False]

    def note(*words: object) -> None:
        where = f"rank {dist.get_rank()}" if dist.is_initialized() else f"early {os.getpid()}"
        with file.open("a") as lines:
            lines.write(",".join(map(str, (where, *words))) + "\n")

    def search(*args: Any) -> Any:
        note("search")
        searching[0] = True
        try:
            return searched(*args)
        finally:
            searching[0] = False

    def prove(schedule: Schedule, problem: Problem) -> Any:
        vocabulary = problem.costs.vocabulary
        waits = vocabulary is not None and vocabulary.output_layer[2] > 0
        if not searching[0]:
            m, is_evaluation = problem.microbatches, problem.forward_only
            note("proof", problem.placement.name, m, is_evaluation, waits)
        return proved(schedule, problem)

    searched, proved = programs._search, build.prove
    monkeypatch.setattr(programs, "_search", search)
    monkeypatch.setattr(build, "prove", prove)


def noting_jobs(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Patch `job_costs` so that each job whose costs are computed leaves a line in ``file``."""

    def noted(source: CostsSource, described: Job, slices: int, *more: Any, **named: Any) -> Costs:
        with file.open("a") as lines:
            lines.write(f"{replace(described, name='')}\n")
        return job_costs(source, described, slices, *more, **named)

    for module in (arguments, programs):
        monkeypatch.setattr(module, "job_costs", noted)


def test_one_rank_searches_and_each_proves_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under v-auto one rank searches, and each rank proves each program once. On 4 ranks all
    ranks used to search before there were process groups, and again at the first step: once with
    the output layer's weight gradient computed in W and once with it computed in I. The second
    search was not recognized as the same, because the description of its job lacked Megatron's
    arguments."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shorten_search(monkeypatch)
    file, jobs = tmp_path / "notes", tmp_path / "jobs"
    noting_proofs(monkeypatch, file)
    noting_jobs(monkeypatch, jobs)
    ours = {"pipeline_schedule": "v-auto", "train_iters": 2, "padded_vocab_size": 64}
    train(4, model_flags(pipeline_model_parallel_size=4, num_layers=8, **ours))
    notes = Counter(file.read_text().splitlines())
    assert {note: n for note, n in notes.items() if "search" in note} == {"rank 0,search": 1}
    assert set(notes.values()) == {1}
    ranks = Counter(note.split(",")[0] for note in notes if ",v,8,False," in note)
    early = [count for rank, count in ranks.items() if "early" in rank]
    # On each rank two schedules stand in for the search: with the output layer's W fused into I,
    # and not fused.
    assert early == [2] * 4
    assert [ranks[f"rank {rank}"] for rank in range(4)] == [0, 1, 1, 1]
    described = jobs.read_text().splitlines()
    assert len(described) == 5 and len(set(described)) == 1
