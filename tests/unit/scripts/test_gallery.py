"""Tests of the gallery: its script draws the schedules that its page shows, each with the command
for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.registry import Maturity, entries
from scripts import draw_gallery
from tests.helpers.pages import data_in

ROOT = Path(__file__).resolve().parents[3]


def test_a_page_has_the_requested_schedules(tmp_path: Path) -> None:
    path = draw_gallery.draw(2, 3, "usual", tmp_path, names=("1f1b", "zb-v"))
    assert path.name == "p2-m3-usual.html"
    data = data_in(path.read_text())
    assert data["title"] == "2 ranks, 3 microbatches, costs f=10,i=12,w=8,comm=1"
    assert [run["title"] for run in data["runs"]] == ["1f1b", "zb-v"]
    assert data["open_at_first"] == 4


def test_the_command_over_a_schedule_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (run,) = draw_gallery.runs_of(["zb-v"], 2, 3, draw_gallery.COSTS["vocabulary"])
    (command,) = run.remarks
    assert CliRunner().invoke(app, command.split()[1:]).exit_code == 0
    alone = data_in((tmp_path / "zb-v.html").read_text())["runs"]
    assert [drawn["title"] for drawn in alone] == ["1f1b", "zb-v"]
    assert alone[1]["figures"]["makespan"] == run.figures.makespan


def test_all_stable_schedules_are_in_it_those_that_are_open_first() -> None:
    names = draw_gallery.stable()
    marks = {name: entry.maturity for name, entry in entries().items()}
    assert set(names) == {name for name, mark in marks.items() if mark is Maturity.STABLE}
    assert names[:4] == draw_gallery.FIRST and len(set(names)) == len(names)


def test_the_page_offers_what_is_drawn() -> None:
    page = (ROOT / "scripts" / "gallery.html").read_text()
    for axis, values in {
        "ranks": [f"p{ranks}" for ranks in draw_gallery.RANKS],
        "microbatches": [f"m{number}" for number in draw_gallery.MICROBATCHES],
        "costs": list(draw_gallery.COSTS),
    }.items():
        (offered,) = re.findall(rf"  {axis}: {{ (.*) }},", page)
        assert re.findall(r"(\w+): \"", offered) == values
    told = (ROOT / "docs" / "schedules.md").read_text().partition("## Gallery")[2]
    assert re.findall(r"^\| `(.*)` \|", told, re.MULTILINE) == list(draw_gallery.COSTS.values())
