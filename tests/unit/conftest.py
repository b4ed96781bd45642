"""A cache directory for the tests alone: what they find is neither the user's nor left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Empty at the start, so that a search is tested and not its result of yesterday; shared by
    the tests of one process, so that they search once."""
    with pytest.MonkeyPatch.context() as patch:
        if "MPLCONFIGDIR" not in os.environ:
            # matplotlib would take seconds to list the fonts anew.
            users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            patch.setenv("MPLCONFIGDIR", str(Path(users) / "matplotlib"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
