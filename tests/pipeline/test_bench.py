"""The benchmark on emulated clocks runs every contender and does not flatter any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app

ARGUMENTS = ["bench", "--pp", "2", "-m", "4", "--costs", "f=4,i=4,w=4", "--launches", "1"]


def test_every_contender_takes_at_least_its_ideal_time(tmp_path: Path) -> None:
    """A sleep never ends early: a step below the ideal would be one that left passes out."""
    picture = tmp_path / "bench.svg"
    result = CliRunner().invoke(
        app, [*ARGUMENTS, "--schedules", "1f1b zb-v", "--json", "--plot", str(picture)]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    rows = {row["name"]: row for row in report["rows"]}
    assert {"megatron 1f1b", "torch 1F1B", "torch ZBVZeroBubble", "megatron-ext zb-v"} <= set(rows)
    assert rows["megatron-ext 1f1b"]["ideal"] == pytest.approx(0.06)
    assert rows["megatron-ext zb-v"]["ideal"] == pytest.approx(0.05)
    for row in rows.values():
        assert 0.5 < row["efficiency"] * row["measured"] / row["ideal"] < 1.01
        assert row["measured"] >= row["ideal"]
        assert row["host_microseconds"] > 0
    assert all(0 < microseconds < 1e5 for microseconds in report["autograd_microseconds"])
    assert "<svg" in picture.read_text()


def test_a_vocabulary_that_is_divided_is_measured_beside_one_that_is_not() -> None:
    """The head, as long as a stage, is on one rank of two, or half of it on each."""
    arguments = [*ARGUMENTS[:-4], "--costs", "f=4,i=4,w=4,head=4/4/4", *ARGUMENTS[-2:]]
    result = CliRunner().invoke(
        app, [*arguments, "--schedules", "zb-v", "--vocab-parallel", "2", "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    naive, divided = rows["megatron-ext zb-v"], rows["megatron-ext zb-v, vocabulary 2"]
    assert divided["ideal"] < naive["ideal"]
    for row in (naive, divided):
        assert row["measured"] >= row["ideal"]


def test_a_schedule_that_does_not_exist() -> None:
    result = CliRunner().invoke(app, [*ARGUMENTS, "--schedules", "zb-x"])
    assert result.exit_code == 2
    assert "there is no schedule 'zb-x'" in result.output
