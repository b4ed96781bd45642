"""A cache directory for the tests alone: what they find is neither the user's nor left behind; and
the figures that are drawn in a test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.search import best, pack
from tests.helpers.short_search import fast_packer, same_effort


@pytest.fixture(scope="session", autouse=True)
def own_cache(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[None]:
    """Empty at the start, so that a search is tested and not its result of yesterday; shared by
    the tests of one process, so that they search once. What numba has compiled of the same source
    is kept in pytest's cache, for all processes."""
    with pytest.MonkeyPatch.context() as patch:
        if "MPLCONFIGDIR" not in os.environ:
            # matplotlib would take seconds to list the fonts anew.
            users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            patch.setenv("MPLCONFIGDIR", str(Path(users) / "matplotlib"))
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(cache))
        provider = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
        if provider:
            compiled = cache / "megatron_ext" / "numba"
            compiled.parent.mkdir(0o700)
            shared = provider.mkdir("numba")
            shared.chmod(0o700)  # where others may write, nothing is loaded
            compiled.symlink_to(shared)
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
