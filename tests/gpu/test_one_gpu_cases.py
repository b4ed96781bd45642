"""Tests of the cases of scripts/gpu_tests.sh --one-gpu, rehearsed on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.one_gpu.cases import parts
from tests.gpu.one_gpu.rows import State
from tests.gpu.one_gpu.runner import Part, run_part
from tests.helpers.combinations import at_night

REHEARSED = {
    "calls": ("host calls item", "host calls queue 1"),
    "executor": ("executor offload gis 2", "executor copies"),
    **dict(
        at_night(
            ("gpt", ("gpt reference local", "gpt schedule local zb-v async", "two ranks trial")),
            ("graphs", ("whole iterations eager zb-v", "whole iterations graph zb-v")),
            ("streams", ("streams experts zb-h1 none", "streams experts zb-h1 full")),
        )
    ),
}


@pytest.fixture(autouse=True)
def pytest_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide pytest, as a machine with a GPU may have only torch. Every case used to end at an import
    of pytest."""
    folder = tmp_path / "missing"
    folder.mkdir()
    (folder / "pytest.py").write_text('raise ModuleNotFoundError("pytest is missing here")\n')
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize("name", REHEARSED)
def test_they_run(name: str, tmp_path: Path) -> None:
    part = parts("cpu")[name]
    cases = tuple(case for case in part.cases if case.name in REHEARSED[name])
    assert len(cases) == len(REHEARSED[name])
    rows = list(run_part(Part(cases, part.seconds), tmp_path))
    assert {row.state for row in rows} == {State.SHOWN}, rows
    assert len(rows) >= len(cases)


def test_the_probe_sees_a_call_that_waits(tmp_path: Path) -> None:
    """The probe of host calls finds exactly the one call that must wait, in the rehearsal as on a
    GPU."""
    (case,) = (case for case in parts("cpu")["calls"].cases if case.name.endswith("synchronize"))
    (row,) = run_part(Part((case,), 120), tmp_path)
    assert row.figure.startswith("**waits**")
