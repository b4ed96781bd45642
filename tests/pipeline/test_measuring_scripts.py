"""Scripts that print figures of docs/measurements.md still run, small."""

from __future__ import annotations

import pytest

from scripts import sweep_offload, sweep_schedules
from scripts.benchmarks import metrics, schedules, split, start
from tests.helpers.ranks import run_ranks, values


def test_what_making_a_schedule_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """It forgot to order the messages, and every proof refused."""
    words = ["--family", "zb-h1", "v-min", "--ranks", "4", "--microbatches", "8"]
    assert schedules.main(words) == 0
    lines = map(str.split, capsys.readouterr().out.splitlines())
    rows = [words for words in lines if words[0] in ("zb-h1", "v-min") and len(words) > 6]
    assert {(family, int(p), int(m)) for family, p, m, *_ in rows} == {
        (family, *size) for family in ("zb-h1", "v-min") for size in ((4, 32), (8, 8))
    }
    assert all(int(actions) > int(p) * int(m) for _, p, m, actions, *_ in rows)


def test_every_setting_of_a_family_is_swept(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_schedules.main(["--family", "zb-h1", "--ranks", "2"]) == 0
    lines = map(str.split, capsys.readouterr().out.splitlines())
    row = next(words for words in lines if words and words[0] == "zb-h1")
    cases, problems, proved = map(int, row[1:4])
    assert (cases, problems) == (8, 0) and proved >= 8


def test_what_a_split_costs() -> None:
    """In a rank: it patches Megatron, and leaves it so."""
    words = ["--hidden", "64", "--sequence", "16", "--repetitions", "3"]
    assert values(run_ranks(1, lambda rank: split.main(words), connect=False)) == [0]


def test_what_offload_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_offload, "SPECS", ("gis:vpp=4",))
    monkeypatch.setattr(sweep_offload, "LINKS", {"a link each": ""})
    none, half, full = sweep_offload.rows((1.0,))
    assert full.peak < half.peak < none.peak


def test_what_metrics_cost() -> None:
    result = metrics.measure("zb-h1", 2, 2, "f=1,i=1,w=1", pairs=1)
    assert result.passes == 6 and result.step > 6e-3
    assert result.ratio > 0


def test_what_a_start_costs(capsys: pytest.CaptureFixture[str]) -> None:
    start.main(["--ranks", "20", "--pp", "2", "-m", "2"])
    compared, *built = capsys.readouterr().out.splitlines()
    assert compared.startswith("20 ranks compare their settings in ")
    assert [line.partition(",")[0] for line in built] == list(start.SPECS)
