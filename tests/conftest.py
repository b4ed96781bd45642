"""In which order files run, which tests search, and how much."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from megatron_ext.schedule.search import best
from megatron_ext.schedule.search.effort import small_effort
from scripts.recipes.vocabulary import features_of_flags
from tests.helpers import documents, witnesses

ROOT = Path(__file__).resolve().parents[1]

# The longest first, so that no worker has one left when the others have ended.
LONGEST = (
    "test_placements.py",
    "test_vocabulary_training.py",
    "test_matrix.py",
    "test_checkpoints.py",
    "test_bad_days.py",
    "test_memory.py",
    "test_post_validation_training.py",
    "test_transformer_engine_training.py",
    "test_profile.py",
    "test_versions.py",
    "test_parity.py",
    "test_adversary_training.py",
    "test_adversary.py",
    "test_offload_training.py",
    "test_faults.py",
    "test_post_validation_faults.py",
    # ... and of the unit tests
    "test_model_plan.py",
    "test_offload.py",
    "test_v_auto.py",
    "test_post_validation.py",
    "test_schedule_pages.py",
    "test_line_families.py",
    "test_families.py",
)

# Families that look through many orders of passes: a schedule takes a second, not hundredths.
SEARCHING = ("v-auto", "wave-auto", "loop-auto", "zb-auto", "zb_auto")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        documents.WRITE_PAGES,
        action="store_true",
        help="write the parts of pages that tests find out of date, rather than fail",
    )


def pytest_configure(config: pytest.Config) -> None:
    documents.writes_pages = bool(config.getoption(documents.WRITE_PAGES))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
        if any(name in item.name for name in SEARCHING):
            item.add_marker(pytest.mark.search)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A mark ``covers`` does not hold where its feature ran in no training of the test."""
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
    """A test finds the same with numba as without, and compiles nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best, "effort", small_effort)
        yield
