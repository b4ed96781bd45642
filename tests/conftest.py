"""Hooks of all tests: the order in which files run, the cores that processes share, checks of marks
and skips, short searches, one thread of torch, no network for tokenizers, and when garbage is
collected."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from megatron_ext.search import best
from megatron_ext.search.effort import small_effort
from tests.helpers import documents, skips, witnesses
from tests.helpers.covers.vocabulary import features_of_flags
from tests.helpers.skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]  # names of pytest's hooks

ROOT = Path(__file__).resolve().parents[1]

# Key in pytest's cache of the seconds that the tests of each file took on this machine.
SECONDS = "seconds of files"

_seconds: defaultdict[str, float] = defaultdict(float)


def pytest_addoption(parser: pytest.Parser) -> None:
    skips.add_option(parser)
    parser.addoption(
        documents.WRITE_PAGES,
        action="store_true",
        help="write the parts of pages that tests find out of date, rather than fail",
    )


def pytest_configure(config: pytest.Config) -> None:
    # With this scheduling policy (batch) a process that wakes up does not interrupt a running one.
    # Otherwise a rank that has just sent would stop while it holds gloo's lock, and its thread that
    # polls sockets would spin on that lock, which took a tenth of the CPU time of tests with ranks.
    # If the system has no such policy, nothing changes.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # huggingface_hub reads this variable when it is imported. Our commands set it, but in a process
    # of tests the package is imported by then. Without a network a test used to wait 47 seconds for
    # each tokenizer of a hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    documents.writes_pages = bool(config.getoption(documents.WRITE_PAGES))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect only garbage of the tests, and more rarely than Python does: imports create a million
    objects and hardly any garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the files: those that have not run on this machine first, the ones with most tests
    before others, and then the ones that took longest. So no worker starts a long file when the
    others have ended."""
    seconds = known_seconds(config)
    tests = Counter(map(file_of, items))
    items.sort(key=lambda item: (-seconds.get(file_of(item), math.inf), -tests[file_of(item)]))


def pytest_collection_finish() -> None:
    """Tell the module of trainings that all files are imported, so that forked ranks need not look
    at their modules."""
    if runs := sys.modules.get("tests.helpers.megatron_runs"):
        runs.settle()


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def known_seconds(config: pytest.Config) -> dict[str, float]:
    cache = getattr(config, "cache", None)  # pytest has no cache with -p no:cacheprovider
    return cache.get(SECONDS, {}) if cache else {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Store how long files took; a run of only some tests of a file does not shorten its time."""
    cache = getattr(session.config, "cache", None)
    if cache and _seconds and not hasattr(session.config, "workerinput"):
        known = known_seconds(session.config)
        longest = {file: max(took, known.get(file, 0.0)) for file, took in _seconds.items()}
        cache.set(SECONDS, known | longest)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Fail a test with a mark ``covers`` if the marked feature ran in none of its trainings."""
    if not any(pyfuncitem.iter_markers("covers")):
        return (yield)
    witnesses.begin_test()
    result = yield
    marked = [
        feature
        for mark in pyfuncitem.iter_markers("covers")
        for feature in features_of_flags(mark.kwargs)
    ]
    test = f"{pyfuncitem.path.relative_to(ROOT)}::{pyfuncitem.function.__name__}"
    if unseen := witnesses.unseen(marked, test):
        pytest.fail(f"marked, but under our schedule never ran: {', '.join(map(str, unseen))}")
    return result


@pytest.fixture(autouse=True, scope="session")
def small_searches() -> Iterator[None]:
    """Let searches use their small settings: with these a test finds the same with numba as
    without, and compiles nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best, "effort", small_effort)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Limit torch to one thread. With more, its threads would wait actively for longer than the
    small tensors of a test take."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
