"""A cache directory for the tests alone: what they find is neither the user's nor left behind; and
the figures that are drawn in a test."""

from __future__ import annotations

import sys
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
    """Shared by the tests of one process, so that they search once."""
    with own_cache(tmp_path_factory.mktemp("cache"), pytestconfig):
        yield


@pytest.fixture(scope="session", autouse=True)
def packs_fast(small_searches: None) -> Iterator[None]:
    """Tests without ranks pack with numba where it is installed, few plans too. They find the same:
    a rank of a test would pay more for loading numba than it saves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best, "effort", same_effort)
        patch.setattr(pack, "packer", fast_packer)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads of torch would spin for longer than the small tensors of a test take."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved, to look at what is on them."""
    from matplotlib.figure import Figure

    saved: list[Any] = []
    save = Figure.savefig

    def keep(figure: Any, *args: Any, **options: Any) -> None:
        saved.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved
