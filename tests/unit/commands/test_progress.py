"""Tests of progress lines of long work: what is done, how far it is, and when it ends at the
latest."""

from __future__ import annotations

import functools
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_ext.base import progress
from megatron_ext.base.progress import EVERY, FIRST, Task, reporting, task
from megatron_ext.cli import app
from megatron_ext.commands import progress_line as shown
from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.placement import v
from megatron_ext.schedule.problem import Problem
from tests.helpers.short_search import shorten_search

pytestmark = pytest.mark.real_time

SOON = 0.02  # seconds between progress lines in a test


@contextmanager
def hearing(first: float = FIRST, every: float = EVERY) -> Iterator[list[str]]:
    heard: list[str] = []
    with reporting(heard.append, first=first, every=every):
        yield heard


def wait_for(heard: list[str], lines: int = 1) -> None:
    deadline = time.monotonic() + 10
    while len(heard) < lines and time.monotonic() < deadline:
        time.sleep(SOON)
    assert len(heard) >= lines


def test_short_work_is_not_heard_of() -> None:
    with hearing() as heard, task("adding"):
        pass
    assert not heard


def test_without_a_listener_nothing_runs() -> None:
    threads = threading.active_count()
    with task("searching", 10) as work:
        work.done += 1
        assert threading.active_count() == threads


def test_a_line_that_cannot_be_written_ends_nothing() -> None:
    """If a progress line cannot be written, the work and later lines go on. The thread that prints
    these lines used to end at the first line that it could not write."""
    heard: list[str] = []

    def fail_once(text: str) -> None:
        heard.append(text)
        if len(heard) == 1:
            raise OSError("no space left on device")

    with reporting(fail_once, first=0.0, every=0.0), task("searching"):
        wait_for(heard, lines=2)


def test_work_ends_while_its_line_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LEAVE", SOON)
    is_read, is_said = threading.Event(), threading.Event()

    def block(text: str) -> None:
        is_said.set()
        is_read.wait(10)

    with reporting(block, first=0.0), task("searching"):
        assert is_said.wait(10)
    assert not is_read.is_set()
    is_read.set()


def test_line_says_what_how_far_and_when_it_ends() -> None:
    with hearing(first=0.0) as heard, task("building zb-v"), task("packing plans", 4000) as work:
        work.done = 1000
        wait_for(heard)
    assert heard[0].startswith("building zb-v: packing plans, 1,000 of 4,000; 0 s so far")
    assert "at the most" not in heard[0]  # steps of unequal length do not tell when the work ends


def test_equal_steps_say_when_it_ends() -> None:
    work = Task("packing", 4000, equal_steps=True, started=time.perf_counter() - 10)
    assert work.left is None  # no step is done yet
    work.done = 1000
    assert work.left == pytest.approx(30, abs=0.5)


def test_work_by_the_clock_ends_by_the_clock() -> None:
    work = Task("searching", seconds=60, started=time.perf_counter() - 20)
    assert work.left == pytest.approx(40, abs=0.5)


def test_end_of_a_part_is_not_that_of_the_whole() -> None:
    with (
        hearing(first=0.0) as heard,
        task("schedules", 10),
        task("packing", 2, equal_steps=True) as work,
    ):
        work.done = 1
        wait_for(heard)
    assert "this part" in heard[0]


def test_first_line_waits_and_others_come_now_and_then() -> None:
    with hearing(first=0.3, every=0.3) as heard, task("searching"):
        start = time.monotonic()
        wait_for(heard, 2)
        assert time.monotonic() - start > 0.5
    assert len(heard) == 2


def test_only_the_outermost_listens() -> None:
    """Each progress line is printed once if a function that reports progress calls another one that
    does so. `doctor` reports, and calls functions that report themselves."""
    with hearing(first=0.0) as heard, hearing(first=0.0) as inner, task("searching"):
        wait_for(heard)
    assert not inner


def test_durations_are_for_people() -> None:
    assert [progress.duration(s) for s in (0.4, 59.6, 125)] == ["0 s", "1 min 0 s", "2 min 5 s"]


def test_search_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shorten_search(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    tasks: list[Task] = []
    monkeypatch.setattr(progress._Listener, "__init__", _listener_that_keeps(tasks))
    with reporting(lambda line: None):
        build_program(choose("v-auto"), Problem(v(3), 7, uniform(v(3), 10, 12, 8, 1)))
    packing = next(work for work in tasks if work.what.startswith("packing plans"))
    assert packing.equal_steps and 0 < packing.done <= packing.steps
    assert re.fullmatch(
        r"packing plans, small effort, \d+ of \d+, the best is \d+\.\d% above the bound",
        str(packing),
    )


def _listener_that_keeps(kept: list[Task]) -> object:
    class Keeping(list[Task]):
        def append(self, work: Task) -> None:
            kept.append(work)
            super().append(work)

    def init(self: progress._Listener, remark: progress.Say) -> None:
        self.remark, self.tasks = remark, Keeping()

    return init


def test_cache_that_cannot_be_written_is_mentioned_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cache folder that cannot be written is mentioned once. On a cluster with a full home folder
    each start repeats the search, and no message used to say why."""
    shorten_search(monkeypatch)
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(blocked))
    with hearing() as heard:
        for m in (4, 5):
            build_program(choose("v-auto"), Problem(v(2), m, uniform(v(2), 10, 12, 8, 1)))
    assert len(heard) == 1 and str(blocked) in heard[0] and "XDG_CACHE_HOME" in heard[0]


def test_stdout_stays_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress lines go to stderr, because a script reads the output of ``--json`` from stdout."""
    monkeypatch.setattr(shown, "reporting", functools.partial(reporting, first=0.0))
    words = ["simulate", "zb-auto", "--pp", "8", "-m", "32", "--json"]
    result = CliRunner().invoke(app, words)
    assert json.loads(result.stdout)["schedule"] == "zb-auto"
    assert "building zb-auto for 8 ranks and 32 microbatches" in result.stderr
