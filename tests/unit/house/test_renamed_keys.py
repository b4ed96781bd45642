"""Tests that a measured file of the last version is refused with a link to the page that tells how
to edit it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.base.text_file import RENAMED_KEYS
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.observe.trace import TraceFile, read_trace, traced_step
from megatron_ext.race.race_record import RaceRecord, load_race_record, save_race_record
from megatron_ext.schedule.costs_text import load_costs, parse_costs, save_costs
from megatron_ext.schedule.placement import v
from megatron_ext.schedule.problem import Problem, ScheduleOptions
from megatron_ext.schedule.schedule import is_compute
from tests.helpers.schedules import program

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / RENAMED_KEYS.removesuffix("#renamed-keys")
ROW = re.compile(r"^\| `?(\S+?)`? \| (\d+), (\d+) \| `(\w+)` \| `(\w+)` \|$", re.MULTILINE)
COSTS = "f=10,i=12,w=8,comm=1,output_layer=5/6/4,embedding=1/2,overlap_saving=3"
Write = Callable[[Path], None]
Read = Callable[[Path], Any]


def write_costs(path: Path) -> None:
    save_costs(parse_costs(COSTS, v(2)), path)


def write_trace(path: Path) -> None:
    problem = Problem(v(2), 4, parse_costs(COSTS, v(2)), options=ScheduleOptions(pairs=True))
    made = program("zb-v", problem)
    simulated = simulate(made, made.problem.costs)
    passes = tuple(event for event in simulated.events if is_compute(event.action))
    TraceFile(path).add(traced_step(7, replace(simulated, events=passes), simulated, 1e-5))


def write_race(path: Path) -> None:
    save_race_record(RaceRecord({"GPU": "8 x H100"}), path)


FILES: dict[str, tuple[Write, Read]] = {
    "costs": (write_costs, lambda path: load_costs(path, v(2))),
    "trace.json": (write_trace, read_trace),
    "race.json": (write_race, load_race_record),
}


def table() -> dict[str, tuple[int, int, dict[str, str]]]:
    """Return, for each file, the old and the new version and the renamed keys, read from the
    page."""
    _, _, section = PAGE.read_text().partition("## Renamed keys")
    found: dict[str, tuple[int, int, dict[str, str]]] = {}
    for file, old, new, before, now in ROW.findall(section):
        found.setdefault(file, (int(old), int(new), {}))[2][before] = now
    return found


def renamed(data: Any, names: dict[str, str]) -> Any:
    if isinstance(data, dict):
        return {names.get(key, key): renamed(value, names) for key, value in data.items()}
    return [renamed(one, names) for one in data] if isinstance(data, list) else data


def keys_in(data: Any) -> Iterator[str]:
    for value in data.values() if isinstance(data, dict) else data:
        if isinstance(value, dict | list):
            yield from keys_in(value)
    yield from data if isinstance(data, dict) else ()


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_the_last_version_is_refused_and_read_once_edited(
    file: str, tmp_path: Path
) -> None:
    (write, read), (old, new, names) = FILES[file], table()[file]
    path = tmp_path / "file.json"
    write(path)
    data, known = json.loads(path.read_text()), read(path)
    assert data["version"] == new and set(names.values()) <= set(keys_in(data))
    before = renamed(data, {now: key for key, now in names.items()}) | {"version": old}
    path.write_text(json.dumps(before))
    with pytest.raises(ValueError, match=f"rename its keys as {re.escape(RENAMED_KEYS)} says"):
        read(path)
    path.write_text(json.dumps(renamed(before, names) | {"version": new}))
    assert read(path) == known


def test_the_command_of_the_page_edits_costs(tmp_path: Path) -> None:
    """The sed command on the page renames the keys of a costs file. The file's section about the
    measured machine has a version number of its own, which the command does not change."""
    path = tmp_path / "costs.json"
    costs = parse_costs(COSTS, v(2))
    save_costs(costs, path, {"machine": {"version": 1}})
    new = path.read_text()
    _, version, names = table()["costs"]
    old = new.replace(f'  "version": {version},', f'  "version": {version - 1},', 1)
    for key, now in names.items():
        old = old.replace(f'"{now}":', f'"{key}":')
    path.write_text(old)
    (command,) = re.findall(r"^    (sed .*)$", PAGE.read_text(), re.MULTILINE)
    subprocess.run(shlex.split(command), cwd=tmp_path, check=True)
    assert old != new == path.read_text()


def test_the_table_names_each_file_and_nothing_else() -> None:
    assert table().keys() == FILES.keys()
