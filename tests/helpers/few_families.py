"""Plans that compare few families, for tests that need only some candidates."""

from __future__ import annotations

import pytest

from megatron_ext.launch.planner.alternatives import first_answer, without_full_recompute
from megatron_ext.planner import planner
from megatron_ext.planner.planner import all_specs


def only_families(monkeypatch: pytest.MonkeyPatch, *specs: str) -> None:
    """Let plans compare only the families ``specs``."""
    for module in (planner, first_answer, without_full_recompute):
        monkeypatch.setattr(module, "all_specs", lambda: list(specs))


def specs_with_few_chunks() -> list[str]:
    """Return every spec except those of searches on loops with more than three chunks, which take
    the most time."""
    return [spec for spec in all_specs() if spec not in _MANY_CHUNKS]


_MANY_CHUNKS = [f"loop-auto:vpp={chunks}" for chunks in (4, 5, 6)]
