"""Fixtures of tests without ranks: their own cache folder, quick searches, and the pictures that a
test saves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_ext.search import best, pack
from tests.helpers.own_cache import own_cache
from tests.helpers.short_search import fast_packer, same_effort


@pytest.fixture(scope="session", autouse=True)
def shared_cache(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[None]:
    """Set a cache folder that all tests of a process share, so that each search runs once."""
    with own_cache(tmp_path_factory.mktemp("cache"), pytestconfig):
        yield


@pytest.fixture(scope="session", autouse=True)
def packs_fast(small_searches: None) -> Iterator[None]:
    """Let tests without ranks pack schedules with numba if it is installed. numba is then used even
    for a short search. The results are the same. Ranks of a test do not use it, as loading numba
    would take them more time than it saves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best, "effort", same_effort)
        patch.setattr(pack, "packer", fast_packer)
        yield


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of the matplotlib figures that a test saves, so that the test can look at
    them."""
    from matplotlib.figure import Figure

    saved: list[Any] = []
    save = Figure.savefig

    def keep(figure: Any, *args: Any, **options: Any) -> None:
        saved.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved
