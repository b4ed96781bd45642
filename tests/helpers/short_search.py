"""v-auto's search made short, for tests of what is done with what it finds."""

from __future__ import annotations

import pytest

from megatron_ext.schedule.search import v_search

_SHORT = {
    "_LEAST_PASSES": 20_000,
    "_MOST_PASSES": 20_000,
    "_STEPS": 2,
    "_PERIODS": (1.0,),
    "_WEIGHTS": (1.0,),
    "_PROMISING": 1,
    "_ROUNDS": 1,
}


def shorten_search(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _SHORT.items():
        monkeypatch.setattr(v_search, name, value)
