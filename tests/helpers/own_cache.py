"""A cache directory for the tests alone, which shares only the code that numba has compiled."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def own_cache(cache: Path, config: pytest.Config) -> Iterator[None]:
    """Let searches store their results in the empty folder ``cache``, so that a test runs the
    search and does not read its result of yesterday.

    Code that numba has compiled of the same source is stored in pytest's cache, for all processes,
    as compiling takes longer than all searches.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "MPLCONFIGDIR" not in os.environ:
            # The user's folder of matplotlib is kept, as matplotlib takes seconds to list the
            # fonts.
            users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            patch.setenv("MPLCONFIGDIR", str(Path(users) / "matplotlib"))
        patch.setenv("XDG_CACHE_HOME", str(cache))
        provider = getattr(config, "cache", None)  # pytest has no cache with -p no:cacheprovider
        if provider:
            compiled = cache / "megatron_ext" / "numba"
            compiled.parent.mkdir(0o700)
            shared = provider.mkdir("numba")
            # The folder gets this mode, as compiled code is not loaded from a folder that other
            # users may write to.
            shared.chmod(0o700)
            compiled.symlink_to(shared)
        yield
