"""The soak run, in short: random programs one after another, without a hang and without a leak."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from scripts import soak
from tests.helpers.ranks import HANGS


def test_soak(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        soak.main(["--iterations", "25", "--growth", "1", "--seconds", str(HANGS), "--json"]) == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert [len(iterations) for iterations in report["ranks"]] == [25] * 4
    assert len({iteration["drawn"] for iteration in report["ranks"][0]}) > 15
