"""Short searches, for tests of code that uses their results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ext.search import best, improve, pack, recompute_search
from megatron_ext.search.effort import Effort, small_effort
from megatron_ext.search.job_shop import JobShop
from megatron_ext.search.pack import Pack

_SHORT = {"_MIN_STEPS": 2, "_PERIODS": (100,), "_WEIGHTS": (100,), "_PROMISING": 1, "_ROUNDS": 1}


_in_python = pack.packer


def fast_packer(shop: JobShop) -> Pack:
    """Return the compiled packer, or without numba the one in Python. Both return the same start
    times (tests/unit/search/test_packing.py), the compiled one thirty times as fast."""
    try:
        from megatron_ext.search import compiled
    except Exception:  # a numba that does not match its numpy may raise any exception
        return _in_python(shop)
    return compiled.compiled_packer(shop)


def same_effort() -> Effort:
    """Return the settings of a small search with the fastest packer here. Packers with and without
    numba return the same results."""
    return small_effort(fast_packer)


def little_effort(passes: int = 20_000) -> Effort:
    """Return the settings of a search that packs ``passes`` passes in plain Python, even where
    numba is installed."""
    return replace(small_effort(pack.packer), least=passes, most=passes)


def shorten_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best, "effort", little_effort)
    for name, value in _SHORT.items():
        monkeypatch.setattr(improve, name, value)
        if hasattr(recompute_search, name):
            monkeypatch.setattr(recompute_search, name, value)
