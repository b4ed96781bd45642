"""Plans of a few families, for tests of what is done with the candidates."""

from __future__ import annotations

import pytest

from megatron_ext.launch_planner.alternatives import first_answer, without_full_recompute
from megatron_ext.planner import planner


def only_families(monkeypatch: pytest.MonkeyPatch, *specs: str) -> None:
    """Have plans compare these families alone."""
    for module in (planner, first_answer, without_full_recompute):
        monkeypatch.setattr(module, "all_specs", lambda: list(specs))
